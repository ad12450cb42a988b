"""Random uses of a model, plain and compiled: the usual operations on modules, one after the other.

``python -m tests.fuzz.model_programs FIRST COUNT`` runs many and prints those that differ.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import sidefx_train
from tests.support.parity import photograph, same


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.factor, self.calls = 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        return torch.relu(self.norm(self.lin(x))) * self.gain * self.factor + x


class Holder(nn.Module):
    """A model of models; one submodule occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.again = self.blocks[0]
        self.drop = nn.Dropout(0.5)
        self.factor, self.calls = 1.0, 0
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.drop(self.again(x)) * self.factor * self.gain


MODELS: list[Callable[[], nn.Module]] = [
    Block,
    Holder,
    lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)),
    lambda: nn.Sequential(Block(), nn.Linear(4, 4)),
    lambda: nn.Linear(4, 4),
]


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class Use:
    """One model in use. Each method is an operation; its result is compared."""

    def __init__(self, make: Callable[[], nn.Module], compiled: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.compiled = compiled
        model = make()
        self.net: Any = sidefx_train.compile(model, backend="eager", rng="eager") if compiled else model
        self.handles: list[Any] = []
        self.seen: list[Any] = []
        self.pick = random.Random(seed)
        self.averaged: Any = None
        self._optimizer()

    def _optimizer(self) -> None:
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9) if trained else None

    def _dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    def _x(self, rows: int = 3) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.pick.randrange(1000))
        return torch.randn(rows, 4, generator=generator).to(self._dtype())

    def _linear(self) -> nn.Linear:
        found = [m for m in self.net.modules() if isinstance(m, nn.Linear)]
        return found[self.pick.randrange(len(found))]

    def call(self) -> Any:
        return self.net(self._x(self.pick.choice([3, 3, 3, 5])))

    def call_without_gradients(self) -> Any:
        with torch.no_grad():
            return self.net(self._x())

    def train_once(self) -> Any:
        self.net.zero_grad(set_to_none=self.pick.random() < 0.7)
        loss = self.net(self._x()).square().mean()
        if loss.requires_grad:
            loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def train_in_a_step(self) -> Any:
        if self.optimizer is None:
            return None

        def step(x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()  # type: ignore[union-attr]
            loss = self.net(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.optimizer.step()  # type: ignore[union-attr]
            return loss.detach(), [name for name, _ in self.net.named_modules()], self.net in {self.net: 1}

        call = sidefx_train.compile(step, backend="eager", rng="eager") if self.compiled else step
        return [call(self._x()) for _ in range(2)]

    def train_mode(self) -> Any:
        return self.net.train(self.pick.random() < 0.5) is self.net, self.net.training

    def eval_mode(self) -> Any:
        self.net.eval()
        return [m.training for m in self.net.modules()]

    def names(self) -> Any:
        found = [name for name, _ in self.net.named_modules()], [name for name, _ in self.net.named_parameters()]
        return found, [name for name, _ in self.net.named_buffers()], list(self.net.state_dict()), repr(self.net)

    def load(self) -> Any:
        state = {
            name: value + 1 if value.is_floating_point() else value for name, value in self.net.state_dict().items()
        }
        return str(self.net.load_state_dict(state))

    def convert(self) -> Any:
        found = self.net.double() if self._dtype() == torch.float32 else self.net.float()
        self._optimizer()
        return found is self.net

    def freeze(self) -> Any:
        parameters = list(self.net.parameters())
        chosen = parameters[self.pick.randrange(len(parameters))]
        chosen.requires_grad_(not chosen.requires_grad)
        self._optimizer()
        return [p.requires_grad for p in parameters]

    def set_attribute(self) -> Any:
        self.net.factor = self.pick.choice([0.5, 1.0, 2.0])
        self.net.note = ["a", self.pick.randrange(3)]
        return self.net.factor, self.net.note, "note" in vars(self.net)

    def delete_attribute(self) -> Any:
        if hasattr(self.net, "note"):
            del self.net.note
        return hasattr(self.net, "note")

    def missing_attribute(self) -> Any:
        try:
            return self.net.nothing_of_that_name
        except AttributeError as error:
            return str(error)

    def replace_child(self) -> Any:
        name, child = next((n, c) for n, c in [*self.net.named_children(), ("none", None)])
        if isinstance(child, nn.Linear):
            setattr(self.net, name, nn.Linear(child.in_features, child.out_features).to(self._dtype()))
            self._optimizer()
        return name

    def add_buffer(self) -> Any:
        self.net.register_buffer("extra", torch.ones(2), persistent=self.pick.random() < 0.5)
        return "extra" in self.net.state_dict()

    def hook_forward(self) -> Any:
        scale = self.pick.choice([1.0, 2.0])
        self.handles.append(self.net.register_forward_hook(lambda m, args, out: out * scale))

    def hook_before(self) -> Any:
        seen = self.seen
        self.handles.append(self.net.register_forward_pre_hook(lambda m, args: seen.append(type(m).__name__)))

    def hook_child(self) -> Any:
        seen = self.seen
        self.handles.append(self._linear().register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape))))

    def hook_backward(self) -> Any:
        seen = self.seen
        hook = lambda m, before, after: seen.append(len(after))  # noqa: E731
        self.handles.append(self.net.register_full_backward_hook(hook))

    def hook_parameter(self) -> Any:
        weight = self._linear().weight
        if weight.requires_grad and weight.is_leaf:
            self.handles.append(weight.register_hook(lambda grad: grad * 0.5))

    def unhook(self) -> Any:
        if self.handles:
            self.handles.pop(self.pick.randrange(len(self.handles))).remove()

    def copied(self) -> Any:
        if self.handles or parametrize.is_parametrized(self._linear()):
            return None
        self.net = copy.deepcopy(self.net)
        self._optimizer()
        return type(self.net).__name__

    def pickled(self) -> Any:
        if self.handles or any(parametrize.is_parametrized(m) for m in self.net.modules()) or not self._can_pickle():
            return None
        if self.pick.random() < 0.5:
            self.net = pickle.loads(pickle.dumps(self.net))
        else:
            file = io.BytesIO()
            torch.save(self.net, file)
            file.seek(0)
            self.net = torch.load(file, weights_only=False)
        self._optimizer()
        return type(self.net).__name__

    def _can_pickle(self) -> bool:
        return not any(m._forward_hooks or m._forward_pre_hooks for m in self.net.modules())

    def functional(self) -> Any:
        others = {name: p.detach() * 0.5 for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, others, (self._x(),))

    def average(self) -> Any:
        if self.handles or any(parametrize.is_parametrized(m) for m in self.net.modules()):
            return None
        if self.averaged is None or len(list(self.averaged.parameters())) != len(list(self.net.parameters())):
            self.averaged = AveragedModel(self.net)
        if next(self.averaged.parameters()).dtype != self._dtype():
            self.averaged = AveragedModel(self.net)
        shapes = [tuple(p.shape) for p in self.averaged.module.parameters()]
        if shapes == [tuple(p.shape) for p in self.net.parameters()]:
            self.averaged.update_parameters(self.net)
        return self.averaged(self._x()), dict(self.averaged.state_dict())

    def within(self) -> Any:
        holder = nn.Sequential(nn.Linear(4, 4).to(self._dtype()), self.net)
        out = holder(self._x())
        out.square().mean().backward()
        return out, list(holder.state_dict()), [name for name, _ in holder.named_modules()]

    def apply_function(self) -> Any:
        seen: list[str] = []
        found = self.net.apply(lambda m: seen.append(type(m).__name__))
        return found is self.net, seen

    def parametrized(self) -> Any:
        layer = self._linear()
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
        elif isinstance(layer.weight, nn.Parameter):
            chosen = self.pick.randrange(2)
            parametrizations.weight_norm(layer) if chosen else parametrize.register_parametrization(
                layer, "weight", Double()
            )
        self._optimizer()
        return sorted(self.net.state_dict())

    def parametrized_itself(self) -> Any:
        if not isinstance(vars(self.net).get("_parameters", {}).get("gain"), nn.Parameter):
            return None
        parametrize.register_parametrization(self.net, "gain", Double())
        out = self.net(self._x())
        parametrize.remove_parametrizations(self.net, "gain")
        self._optimizer()
        return out, type(self.net).__name__, self.net.__class__.__name__

    def pruned(self) -> Any:
        layer = self._linear()
        if isinstance(vars(layer)["_parameters"].get("weight"), nn.Parameter) and not self.handles:
            prune.l1_unstructured(layer, "weight", amount=0.3)
            if self.pick.random() < 0.5:
                prune.remove(layer, "weight")
            self._optimizer()
        return sorted(self.net.state_dict())

    def tied(self) -> Any:
        layers = [m for m in self.net.modules() if isinstance(m, nn.Linear) and m.weight.shape == (4, 4)]
        plain = [m for m in layers if isinstance(vars(m)["_parameters"].get("weight"), nn.Parameter)]
        if len(plain) > 1:
            plain[0].weight = plain[-1].weight
            self._optimizer()
        return len(list(self.net.parameters()))

    def container(self) -> Any:
        if not isinstance(self.net, nn.Sequential):
            return None
        self.net.append(nn.Tanh())
        return (
            len(self.net),
            [type(m).__name__ for m in self.net],
            type(self.net[0]).__name__,
            type(self.net[:1]).__name__,
        )

    def classes(self) -> Any:
        net = self.net
        return (
            net.__class__.__name__,
            [c.__name__ for c in net.__class__.__mro__],
            isinstance(net, nn.Module),
            bool(net == net),
        )

    def state(self) -> Any:
        known = (self.net.state_dict(), [p.grad for p in self.net.parameters()], self.seen)
        return *known, getattr(self.net, "calls", None), torch.get_rng_state()


OPERATIONS = [name for name in vars(Use) if not name.startswith("_") and name != "state"]
FREQUENT = ["call", "train_once", "train_once"]


def check(number: int) -> list[str]:
    """Runs program ``number`` on both models; returns its operations.

    Raises:
        AssertionError: something differs.
    """
    pick = random.Random(number)
    make = pick.choice(MODELS)
    operations = [pick.choice(FREQUENT if pick.random() < 0.4 else OPERATIONS) for _ in range(pick.randint(4, 12))]
    photos = []
    for compiled in (False, True):
        use = Use(make, compiled, number)
        taken = []
        for name in operations:
            try:
                found = getattr(use, name)()
            except Exception as error:
                found = f"{type(error).__name__}: {str(error)[:200]}"
            taken.append(photograph([name, found, use.state()]))
        photos.append(taken)
    for index, (plain, ours) in enumerate(zip(*photos, strict=True)):
        same(plain, ours, f"{operations[: index + 1]}", True)
    return operations


def main(first: int, count: int) -> None:
    warnings.simplefilter("ignore")
    began, differ = time.time(), 0
    for number in range(first, first + count):
        try:
            check(number)
        except AssertionError as error:
            differ += 1
            print(f"=== seed {number} differs: {str(error)[:600]}", flush=True)
    print(f"seeds {first} to {first + count - 1}: {differ} differ; {time.time() - began:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
