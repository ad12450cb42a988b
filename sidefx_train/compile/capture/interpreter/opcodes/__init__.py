"""Handlers of the instructions, by family. A handler's arguments are ``(interp, frame, instr)``.

It returns ``None`` to continue, or ``RETURNED``/``YIELDED`` with the value in ``frame.result``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from sidefx_train.compile.capture.interpreter.opcodes import (
    arithmetic,
    calls,
    containers,
    control,
    exception_handling,
    match,
    names,
    stack,
)
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.frame import Frame
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI

TABLE: dict[str, Callable[..., Any]] = {}
for _family in (arithmetic, calls, containers, control, exception_handling, names, match, stack):
    TABLE.update(_family.TABLE)


def unsupported(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> NoReturn:
    """Handler of every instruction without a handler of its own."""
    raise Unsupported("SFX105", f"opcode {instr.name}")
