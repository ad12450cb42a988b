"""Binds the instructions of a code object to their handlers, once per code object."""

from __future__ import annotations

import types

from sidefx_train.compile.capture.interpreter import opcodes
from sidefx_train.compile.capture.interpreter.code import CodeInfo

_CACHE: dict[int, CodeInfo] = {}


def code_info(code: types.CodeType) -> CodeInfo:
    """Returns the decoded form of ``code`` with a handler for each instruction; cached per code object."""
    found = _CACHE.get(id(code))
    if found is None:
        found = CodeInfo(code)  # it keeps the code alive, so its id stays unique
        for instr in found.instructions:
            instr.run = opcodes.TABLE.get(instr.name, opcodes.unsupported)
        _CACHE[id(code)] = found
    return found
