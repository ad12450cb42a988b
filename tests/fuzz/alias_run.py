"""Runs a program over views eagerly and captured, and compares autograd and memory state of its tensors."""

from __future__ import annotations

import linecache
import re
import textwrap
import types
import warnings
from typing import Any

import torch

import sidefx_train
from tests.fuzz.compare import Differs
from tests.fuzz.run import Outcome
from tests.opinfo.compare import same_contents

CALLS = 3
_FILE = "<alias program>"
_NODE = re.compile(r",? ?(which is )?output \d+ of [\w:]+,?|\w*Backward\w*|CopySlices")
SAID: list[Any] = []


class Flat(torch.autograd.Function):
    """A view made by a custom function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.reshape(ctx.shape) * 2


class Same(torch.autograd.Function):
    """A custom function that returns its own argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def source_of(program: tuple[str, str, str]) -> str:
    """Returns the source of a program in the fuzzer's form: its arguments, its step, and the statements afterwards."""
    arguments, step, after = program
    names = ", ".join(part.split("=")[0].strip() for part in arguments.split("; "))
    lines = [
        "import torch",
        "from tests.fuzz.alias_run import Flat, Same, attempt",
        "def build():",
        *(f"    {part}" for part in arguments.split("; ")),
        f"    return {names},",
        f"def step({names}):",
        *(f"    {part}" for part in step.split("; ")),
        f"def after(outs, {names}):",
        *(textwrap.indent(after, "    ").splitlines()),
        "    return outs",
    ]
    return "\n".join(lines) + "\n"


def attempt(line: str, kind: str, outs: Any, names: dict[str, Any]) -> None:
    """Runs one later operation; an exception is compared too."""
    try:
        made = eval(compile(line, "<after>", kind), {"torch": torch, "outs": outs, **names})
        SAID.append(made if isinstance(made, torch.Tensor) else None)
    except Exception as error:
        SAID.append(_words(error))


def _words(error: Exception) -> str:
    """Returns an error message without names of autograd nodes and saved tensors: a captured part is one node."""
    text = _NODE.sub("", str(error).split("Hint:")[0])
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+', '0x', text)}"[:400]


def _facts(t: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": tuple(t.shape),
        "stride": t.stride(),
        "offset": t.storage_offset(),
        "dtype": t.dtype,
        "conj": t.is_conj(),
        "version": None if t.is_inference() else t._version,
        "requires_grad": t.requires_grad,
        "leaf": t.is_leaf,
        "a view": t._is_view(),
        "inference": t.is_inference(),
    }


class _World:
    """One run of the program."""

    def __init__(self, source: str, backend: str | None) -> None:
        module = types.ModuleType("alias_program")
        exec(compile(source, _FILE, "exec"), vars(module))
        self.build, self.after = module.build, module.after
        self.compiled = None if backend is None else sidefx_train.compile(module.step, backend=backend)
        self.step = self.compiled or module.step

    def call(self) -> dict[str, Any]:
        """Runs a call and the statements after it; returns the resulting state, part by part."""
        SAID.clear()
        given = self.build()
        try:
            outs: Any = self.step(*given)
        except Exception as error:
            return {"error": _words(error), "arguments": _photograph(given)}
        found = {"results": _photograph((*outs, *given))}
        self.after(outs, *given)
        said = [item for item in SAID if isinstance(item, torch.Tensor)]
        found["afterwards"] = _photograph((*outs, *given, *said))
        found["said"] = [item for item in SAID if not isinstance(item, torch.Tensor)]
        try:
            found["gradients"] = _gradients(outs, given)
        except Exception as error:
            found["backward raises"] = _words(error)
        return found


def _gradients(outs: Any, given: Any) -> Any:
    wanted = [t for t in {id(o): o for o in outs}.values() if t.requires_grad and t.grad_fn is not None]
    leaves = [t for t in {id(t): t for t in given}.values() if t.requires_grad]
    if not wanted or not leaves:
        return ()
    total = sum((t * torch.linspace(0.5, 2, t.numel()).view(t.shape)).sum().real for t in wanted)
    return torch.autograd.grad(total, leaves, allow_unused=True)


def _photograph(tensors: tuple[Any, ...]) -> dict[str, Any]:
    """Returns all facts of some tensors and of their relations."""
    known = list(tensors)
    try:
        return _pictured(known)
    except RuntimeError as error:  # autograd forbids access to some outputs of multi-view functions
        return {"forbidden": _words(error)}


def _pictured(known: list[torch.Tensor]) -> dict[str, Any]:
    return {
        "facts": [_facts(t) for t in known],
        "values": [t.detach().clone() for t in known],
        "objects": [next(j for j, u in enumerate(known) if u is t) for t in known],
        "bases": [next((j for j, u in enumerate(known) if u is t._base), -1 if t._base is None else -2) for t in known],
        "memory": [[t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr() for u in known] for t in known],
    }


def _compare(want: Any, have: Any, where: str, close: bool = False) -> None:
    if isinstance(want, dict):
        if set(want) != set(have):
            raise Differs(f"{where}: {_told(have)}, eager: {_told(want)}")
        for name in want:
            _compare(want[name], have[name], f"{where}, {name}", close)
    elif isinstance(want, (list, tuple)) and any(isinstance(item, (dict, torch.Tensor, list)) for item in want):
        if len(want) != len(have):
            raise Differs(f"{where}: {len(have)} of them, eager has {len(want)}")
        for i, (a, b) in enumerate(zip(want, have, strict=True)):
            _compare(a, b, f"{where} {i}", close)
    elif isinstance(want, torch.Tensor):
        known = isinstance(have, torch.Tensor) and want.shape == have.shape and want.dtype == have.dtype
        if not known or not (_alike(want, have) if close else same_contents(want, have)):
            raise Differs(f"{where}: {have}, eager has {want}")
    elif want != have:
        raise Differs(f"{where}: {have}, eager has {want}")


def _alike(want: torch.Tensor, have: torch.Tensor) -> bool:
    return torch.allclose(want.resolve_neg(), have.resolve_neg(), rtol=1e-5, atol=1e-6, equal_nan=True)


def _told(found: dict[str, Any]) -> str:
    return str({name: value for name, value in found.items() if isinstance(value, str)} or list(found))


def check(source: str, backend: str = "aot_eager", close: bool = False) -> Outcome:
    """Compares the program's two worlds.

    Args:
        source: the program.
        backend: backend of the captured world.
        close: values may differ in rounding.

    Raises:
        Differs: they differ; the message shows where.
    """
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, captured = _World(source, None), _World(source, backend)
        for index in range(CALLS):
            want = eager.call()
            if any("INTERNAL ASSERT" in part.get("forbidden", "") for part in want.values() if isinstance(part, dict)):
                break  # a fault of torch's own
            _compare(want, captured.call(), f"call {index}", close)
    report = captured.compiled.report()
    reasons = tuple(f"{item.code} {item.reason}" for item in report.breaks + report.fallbacks)
    internal = [reason for reason in reasons if reason.startswith(("SFX204", "SFX205"))]
    if internal:
        raise Differs(f"internal error: {internal[0]}")
    return Outcome(CALLS, report.replays, reasons)
