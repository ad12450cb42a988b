"""A branch on a tensor between the forward and its backward: once it is usual, the step is one graph again."""

from __future__ import annotations

import pytest
import torch

from tests.support.parity import Program, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

ROWS, WIDTH = 8, 3


def early_stopping(as_shown, stops):
    """The update of PPO with a target for the divergence, at which the update is left out."""

    def make():
        policy = torch.nn.Linear(WIDTH, 2)
        deviation = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([*policy.parameters(), deviation], lr=1e-3)
        found = {"divergences": [], "stops": 0}

        def step(x, actions, old):
            chosen = torch.distributions.Normal(policy(x), deviation.exp())
            log_prob = chosen.log_prob(actions).sum(1)
            ratio = (log_prob - old).exp()
            loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean() - 0.01 * chosen.entropy().mean()
            with torch.no_grad():
                divergence = as_shown(((ratio - 1) - (log_prob - old)).mean())
                found["divergences"].append(divergence)
            if divergence > 1e6:
                found["stops"] += 1
                return loss.item()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*policy.parameters(), deviation], 0.5)
            optimizer.step()
            return loss.item()

        def batch(index):
            old = torch.full((ROWS,), -40.0 if stops(index) else -3.0)
            return torch.randn(ROWS, WIDTH), torch.randn(ROWS, 2), old

        return Program(step, batch, (policy, deviation, optimizer, found))

    return make


SHOWN = {"a tensor": torch.clone, "an array": lambda kl: kl.cpu().numpy(), "a number": lambda kl: kl.item()}


@pytest.mark.parametrize("as_shown", SHOWN.values(), ids=SHOWN)
def test_one_graph_after_ten_calls(as_shown):
    report = parity(early_stopping(as_shown, lambda index: index == 30), steps=40, captures=None, whole=False)
    assert len(report.captures) == 2 and report.replays == 39
    assert [each.code for each in report.fallbacks] == ["SFX208"]  # call 30 goes the other way
    assert max(part.replays for part in report.parts) <= 11


def test_a_branch_that_goes_both_ways_stays_one():
    report = parity(early_stopping(torch.clone, lambda index: index % 3 == 2), steps=30, captures=None, whole=False)
    assert len(report.captures) <= 2 and not report.fallbacks  # the second assumes the checks of the distribution
