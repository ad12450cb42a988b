"""Runs one program eagerly and compiled, from the same seed, and compares everything observable.

A test writes a *factory*: a function that builds model, optimizer and step from scratch and returns a
:class:`Program`. :func:`parity` calls it twice, runs both programs over the same batches, and compares after every
call the result or exception, the printed text, and the whole state that the program watches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import io
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sidefx_train

RTOL = 1e-5
"""Largest relative difference (in norm, per tensor) that a compiling backend may show."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, range)


@dataclasses.dataclass
class Program:
    """One run of a test: the step, its arguments, and the state to compare.

    Attributes:
        step: the function under test.
        batch: arguments of call ``i``; rebuilt for each run, and compared after the call.
        watch: modules, optimizers and plain objects whose state is compared after every call.
    """

    step: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    watch: Any = ()


@dataclasses.dataclass
class Moment:
    """State after one call."""

    outcome: Any
    state: Any
    printed: str
    raised: Exception | None = None


Factory = Callable[[], Program]
Between = Callable[[Program, int], None]


def parity(
    make: Factory,
    *,
    steps: int = 10,
    backend: Any = "eager",
    captures: int | None = 1,
    between: Between | None = None,
    whole: bool = True,
    **options: Any,
) -> sidefx_train.report.StepReport:
    """Compares ``make()`` run eagerly with ``make()`` compiled, call by call.

    Args:
        make: builds the program from the current seed.
        steps: number of calls.
        backend: ``"eager"`` is compared bitwise, any other with :data:`RTOL`.
        captures: largest number of captures allowed; ``None`` for any.
        between: called before every call, with the program and the call's index.
        whole: the step must be captured whole, without fallback.
        options: further options of :func:`sidefx_train.compile`.

    Returns:
        The compiled step's report.
    """
    strict: dict[str, Any] = {"fullgraph": True, "on_failure": "raise"} if whole else {}
    strict["keep_slower"] = True  # every call after the capture is a replay
    steps_made = []

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        steps_made.append(sidefx_train.compile(fn, backend=backend, **{**strict, **options}))
        return steps_made[-1]

    expected = run(make, steps, lambda fn: fn, between)
    got = run(make, steps, wrap, between)
    exact = backend in ("eager", "aot_eager")
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        if have.raised is not None and want.raised is None:
            raise AssertionError(f"call {index} raised, eager did not: {have.raised}") from have.raised
        same(want.outcome, have.outcome, f"call {index}: result", exact)
        same(want.state, have.state, f"call {index}: state", exact)
        assert want.printed == have.printed, f"call {index}: printed {have.printed!r}, eager printed {want.printed!r}"
    report = sidefx_train.explain(steps_made[0])
    assert report.calls == steps, f"{report.calls} calls reported, {steps} made"
    if whole:
        assert report.fallback_count == 0, f"{report.fallback_count} calls ran eagerly:\n{report}"
        assert not report.breaks, f"the step was broken:\n{report}"
    if captures is not None:
        assert 1 <= len(report.captures) <= captures, f"{len(report.captures)} captures, expected {captures}:\n{report}"
        assert report.graph_count <= captures, f"{report.graph_count} graphs, expected {captures}:\n{report}"
    return report


def seed(value: int) -> None:
    """``torch.manual_seed``, without the stack traces that it formats and keeps for devices that are not in use: they
    took a tenth of the time of a test."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(value)


def run(
    make: Factory, steps: int, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], between: Between | None = None
) -> list[Moment]:
    """Runs one program and takes a snapshot after each call."""
    seed(0)
    program = make()
    step = wrap(program.step)
    moments = []
    for index in range(steps):
        if between is not None:
            between(program, index)
        args = program.batch(index)
        printed = io.StringIO()
        seed(1000 + index)
        with contextlib.redirect_stdout(printed):
            try:
                outcome = ("returned", step(*args))
            except Exception as error:
                outcome = ("raised", type(error), str(error))
                raised = error
            else:
                raised = None
        moments.append(Moment(photograph(outcome), photograph((program.watch, args)), printed.getvalue(), raised))
    return moments


# ---------------------------------------------------------------------- state as comparable data
@dataclasses.dataclass
class Ref:
    """A repeated reference to the object with snapshot number ``index``."""

    index: int


@dataclasses.dataclass
class Picture:
    """Snapshot of one mutable object: its type and contents."""

    kind: str
    content: Any


def photograph(value: Any, seen: dict[int, tuple[int, Any]] | None = None) -> Any:
    """Deep copy of a value's state as plain data; shared objects become :class:`Ref`, so sharing is compared too."""
    seen = {} if seen is None else seen
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        return f"<{getattr(value, '__qualname__', value.__name__)}>"
    if isinstance(value, types.MethodType):
        return (f"<method {value.__func__.__qualname__}>", photograph(value.__self__, seen))
    if isinstance(value, tuple):
        return tuple(photograph(item, seen) for item in value)
    if id(value) in seen:
        return Ref(seen[id(value)][0])
    seen[id(value)] = (len(seen), value)
    return Picture(type(value).__qualname__, _content(value, seen))


def _content(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    if isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return {
            "layout": (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype),
            "requires_grad": value.requires_grad,
            "history": type(value.grad_fn).__name__,
            "version": value._version,
            "grad": photograph(value.grad if value.is_leaf else None, seen),
            "attributes": {name: photograph(item, seen) for name, item in vars(value).items()},
            "versions of inner tensors": [item._version for item in vars(value).values() if hasattr(item, "_version")],
        }
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        return {
            "size": (tuple(value.shape), value.sparse_dim(), value.dense_dim()),
            "coalesced": value.is_coalesced(),
            "parts": [part.detach().clone() for part in (value._indices(), value._values())],
            "requires_grad": value.requires_grad,
            "version": value._version,
        }
    if isinstance(value, torch.Tensor):
        grad = value.grad if value.is_leaf else None
        return {
            "data": value.detach().clone(),
            "requires_grad": value.requires_grad,
            "is_leaf": value.is_leaf,
            "stride": value.stride(),
            "grad": photograph(grad, seen),
        }
    if isinstance(value, nn.Module):
        fields = {name: item for name, item in vars(value).items() if name not in _MODULE_ATTRIBUTES}
        hooks = {name: len(item) for name, item in vars(value).items() if name.endswith("_hooks")}
        return {
            "training": value.training,
            "parameters": {name: photograph(p, seen) for name, p in value._parameters.items()},
            "buffers": {name: photograph(b, seen) for name, b in value._buffers.items()},
            "modules": {name: photograph(m, seen) for name, m in value._modules.items()},
            "fields": {name: photograph(item, seen) for name, item in fields.items()},
            "hooks": hooks,
        }
    if isinstance(value, torch.optim.Optimizer):
        parameters = [p for group in value.param_groups for p in group["params"]]
        return {
            "groups": [photograph({k: v for k, v in group.items() if k != "params"}) for group in value.param_groups],
            "state": [
                {name: photograph(item) for name, item in value.state[p].items()} if p in value.state else None
                for p in parameters
            ],
        }
    if isinstance(value, dict):
        pairs = [(photograph(k, seen), photograph(v, seen)) for k, v in value.items()]
        factory = getattr(value, "default_factory", None)
        return (pairs, photograph(factory, seen)) if factory is not None else pairs
    if isinstance(value, (list, collections.deque)):
        return [photograph(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((photograph(item, seen) for item in value), key=repr)
    fields = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        fields.update(
            {n: getattr(value, n) for n in ((slots,) if isinstance(slots, str) else slots) if hasattr(value, n)}
        )
    return {name: photograph(item, seen) for name, item in fields.items()}


def same(want: Any, have: Any, where: str, exact: bool) -> None:
    """Asserts that two snapshots agree; tensors and floats bitwise, or within :data:`RTOL`."""
    assert type(want) is type(have), f"{where}: {_short(have)}, eager has {_short(want)}"
    if isinstance(want, torch.Tensor):
        _same_tensor(want, have, where, exact)
    elif isinstance(want, Picture):
        assert want.kind == have.kind, f"{where}: is a {have.kind}, eager has a {want.kind}"
        same(want.content, have.content, where, exact)
    elif isinstance(want, dict):
        assert list(want) == list(have), f"{where}: names {list(have)}, eager has {list(want)}"
        for name in want:
            same(want[name], have[name], f"{where}.{name}", exact)
    elif isinstance(want, (list, tuple)) and not isinstance(want, torch.Size):
        assert len(want) == len(have), f"{where}: {len(have)} items, eager has {len(want)}"
        for index, (a, b) in enumerate(zip(want, have, strict=True)):
            same(a, b, f"{where}[{index}]", exact)
    elif isinstance(want, float):
        close = want == have or (want != want and have != have)
        close = close or (not exact and abs(want - have) <= RTOL * abs(want) + 1e-8)
        assert close, f"{where}: {have!r}, eager has {want!r}"
    else:
        assert want == have, f"{where}: {_short(have)}, eager has {_short(want)}"


def _same_tensor(want: torch.Tensor, have: torch.Tensor, where: str, exact: bool) -> None:
    for name in ("dtype", "shape", "device"):
        a, b = getattr(want, name), getattr(have, name)
        assert a == b, f"{where}: {name} {b}, eager has {a}"
    if exact or not want.is_floating_point():
        if not torch.equal(torch.nan_to_num(want), torch.nan_to_num(have)) or not torch.equal(
            want == want, have == have
        ):
            worst = (want.double() - have.double()).abs().max().item()
            raise AssertionError(f"{where}: tensors differ by up to {worst:.3g}")
        return
    error = (want.double() - have.double()).norm().item()
    bound = RTOL * want.double().norm().item() + 1e-8 * want.numel() ** 0.5
    assert error <= bound, f"{where}: off by {error:.3g} in norm, {bound:.3g} allowed"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."


# ---------------------------------------------------------------------- helpers that many tests use
def batches(*shapes: tuple[int, ...], classes: int | None = None, rows: int | None = None) -> Callable[[int], tuple]:
    """Returns ``batch(i)``: normal tensors of these shapes, then (``classes``) labels for the first dimension."""

    def batch(index: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(7 + index)
        made = [torch.randn(*shape, generator=generator) for shape in shapes]
        if classes is not None:
            made.append(torch.randint(0, classes, (rows or shapes[0][0],), generator=generator))
        return tuple(made)

    return batch


def tokens(vocabulary: int, rows: int, length: int) -> Callable[[int], tuple]:
    """Returns ``batch(i)``: token ids and the next token of each position."""

    def batch(index: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(7 + index)
        ids = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def mlp(inputs: int = 6, hidden: int = 8, outputs: int = 3, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, outputs))


def classifier(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], tuple],
    *extra: Any,
) -> Program:
    """Builds the usual step: cross entropy, backward, update, zero_grad; returns the detached loss."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batch, (model, optimizer, *extra))
