"""Binds the instructions of a code object to their handlers, once per code object."""

from __future__ import annotations

import types

from sidefx_train.compile.capture.interpreter import opcodes
from sidefx_train.compile.capture.interpreter.code import CodeInfo

_CACHE: dict[int, CodeInfo] = {}


def code_info(code: types.CodeType) -> CodeInfo:
    """The decoded form of ``code`` with a handler at each instruction, from the cache if it was decoded before."""
    found = _CACHE.get(id(code))
    if found is None:
        found = CodeInfo(code)  # it keeps the code alive, so its id stays its own
        for instr in found.instructions:
            instr.run = opcodes.TABLE.get(instr.name, opcodes.unsupported)
        _CACHE[id(code)] = found
    return found
