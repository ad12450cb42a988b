"""What Inductor does beside compiling: warnings, messages and folders are none of the program's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.disk_cache import new_cache

PROGRAM = """
import sys, warnings
import torch
import sidefx_train

warnings.simplefilter("error")
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(net.parameters())

def step(x):
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


run = sidefx_train.compile(step, warmup=sys.argv[1], on_failure=sys.argv[2])
for _ in range(6):
    run(torch.ones(3, 4))
    run.wait()
report = run.report()
assert report.replays >= 3, report
assert not report.breaks and {each.code for each in report.fallbacks} <= {"SFX206"}, report
if sys.argv[3] == "broken":
    from torch._inductor.graph import GraphLowering

    def broken(*args, **kwargs):
        raise RuntimeError("out of luck")

    GraphLowering.run = broken
    warnings.simplefilter("ignore")
    other = sidefx_train.compile(lambda x: step(x) * 2)
    other(torch.ones(2, 4))
    assert other.report().fallbacks[0].code == "SFX201", other.report()
print("done")
"""


@pytest.mark.parametrize(
    "warmup, failure, then",
    [("now", "raise", "broken"), pytest.param("background", "eager", "", marks=pytest.mark.slow)],
)
def test_nothing_is_said_or_left(tmp_path, monkeypatch, warmup, failure, then):
    """Regression: an import of Inductor's warns, which failed the compilation where warnings are errors; each graph
    left a folder behind, and one that could not be compiled a message about it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    new_cache(tmp_path / "cache", monkeypatch)
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, warmup, failure, then],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr
    assert done.stderr == ""
    left = [path.name for path in (*temporary.iterdir(), *temporary.glob("torchinductor_*/*"))]
    assert not [name for name in left if name.startswith(("tmp", "sidefx_"))], left
