"""Decoded code objects: instructions, slots, arguments."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from sidefx_train.compile.capture.interpreter import bytecode_versions
from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction

_WRITES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"})


class CodeInfo:
    """The decoded form of a code object, which it does not keep alive.

    Args:
        code: the code object.
        gone: called when the code object is freed.

    Attributes:
        instructions: handlers and arguments, in order.
        slots: names of the fast-local slots (variables, cells, free variables).
        arguments: slot of each argument that may be passed by keyword.
        has_with: there is a ``with`` statement.
        stubs: code with the same names for frame objects in tracebacks, by instruction.
        simple: all arguments are positional, without ``*args``, ``**kwargs`` or keyword-only arguments.
    """

    __slots__ = ("_code", "_written", "arguments", "has_with", "instructions", "is_async", "simple", "slots", "stubs")

    def __init__(self, code: types.CodeType, gone: Callable[[Any], object] | None = None) -> None:
        self._code = weakref.ref(code, gone)
        self.instructions: list[Instruction] = bytecode_versions.decode(code)
        self.has_with = any(bytecode_versions.entered_contexts(self.instructions))
        self.slots = bytecode_versions.slot_names(code)
        first, total = code.co_posonlyargcount, code.co_argcount + code.co_kwonlyargcount
        self.arguments = {code.co_varnames[i]: i for i in range(first, total)}
        flags = code.co_flags
        self.simple = not flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) and code.co_kwonlyargcount == 0
        self.is_async = bool(flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))
        self.stubs: dict[int, types.CodeType] = {}
        self._written: frozenset[str] | None = None

    @property
    def code(self) -> types.CodeType:
        """The code object; the caller holds it, in a frame or a function."""
        code = self._code()
        assert code is not None, "the code has been freed"
        return code

    @property
    def written_names(self) -> frozenset[str]:
        """Names stored by ``STORE_ATTR``, ``STORE_GLOBAL`` or ``STORE_DEREF``."""
        if self._written is None:
            self._written = frozenset(self._name(i) for i in self.instructions if i.name in _WRITES)
        return self._written

    def _name(self, instr: Instruction) -> str:
        return self.slots[instr.arg] if instr.name == "STORE_DEREF" else instr.value
