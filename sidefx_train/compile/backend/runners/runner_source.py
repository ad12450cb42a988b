"""Source of a generated function: its lines, the objects that they name, and literals of arguments."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.generated_code import compile_function, forget_source
from sidefx_train.compile.common.source_literals import literal
from sidefx_train.compile.graph.artifacts import Name
from sidefx_train.compile.native import increment_versions, set_versions

_serial = itertools.count()


class RunnerSource:
    """Lines of one generated function and the objects they refer to."""

    def __init__(self, header: str) -> None:
        self.header = header
        self.lines: list[str] = []
        self.globals: dict[str, Any] = {
            "torch": torch,
            "math": math,
            "to_float32": to_float32,
            "to_int32": to_int32,
            "to_int64": to_int64,
            "operator": operator,
            "get_num_threads": torch.get_num_threads,
            "set_num_threads": torch.set_num_threads,
            "increment_versions": increment_versions,
            "set_version": compat.set_version,
            "set_versions": set_versions,
            "grad_enabled": torch.is_grad_enabled,
            "set_grad": compat.set_grad_enabled,
            "autocast_enabled": compat.autocast_enabled,
            "without_autocast": compat.without_autocast,
        }

    def bind(self, name: str, value: Any) -> str:
        """Binds ``value`` to ``name`` for the code."""
        self.globals[name] = value
        return name

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    serial = False
    """Runs on one thread; the caller's setting is restored afterwards."""

    section: tuple[str, tuple[str, ...]] = "", ()
    """How the results of the device section are taken, and the names of its arguments."""

    def text(self) -> str:
        serial = "    threads = get_num_threads()\n    set_num_threads(1)\n" if self.serial else ""
        parallel = "        set_num_threads(threads)\n" if self.serial else ""
        body = "\n".join(f"        {line}" for line in self.lines) or "        pass"
        return (
            f"# {self.header}\ndef run(args):\n"
            "    if autocast_enabled():\n        return without_autocast(run, args)\n"
            f"    grad = grad_enabled()\n    set_grad(False)\n{serial}    try:\n"
            f"{body}\n    finally:\n{parallel}        set_grad(grad)\n"
        )

    def compile(self) -> Callable[[list[Any]], Any]:
        text = self.text()
        filename = f"<sidefx_train runner {next(_serial)}>"
        run = compile_function("run", text, self.globals, filename)
        weakref.finalize(run, forget_source, filename).atexit = False
        return run  # type: ignore[no-any-return]


def to_float32(number: float) -> float:
    """Returns a number rounded as a tensor of that dtype holds it."""
    return ctypes.c_float(number).value


def to_int32(number: int) -> int:
    """Returns a number as a tensor of that dtype holds it: the bits beyond are lost."""
    return ctypes.c_int32(number).value


def to_int64(number: int) -> int:
    """Returns a number as a tensor of that dtype holds it: the bits beyond are lost."""
    return ctypes.c_int64(number).value


def tuple_text(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def argument_text(value: Any, source: RunnerSource) -> str:
    """Returns source of a nested argument; objects without a literal are bound by name."""
    if isinstance(value, Name):
        return value.text
    if isinstance(value, (list, tuple)):
        inner = [argument_text(v, source) for v in value]
        return f"[{', '.join(inner)}]" if isinstance(value, list) else tuple_text(inner)
    return literal(value) or source.bind(f"const{len(source.globals)}", value)
