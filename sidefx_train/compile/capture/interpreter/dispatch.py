"""Binds the instructions of a code object to their handlers, once per code object."""

from __future__ import annotations

import types

from sidefx_train.compile.capture.interpreter import opcodes
from sidefx_train.compile.capture.interpreter.code import CodeInfo

_CACHE: dict[int, CodeInfo] = {}


def code_info(code: types.CodeType) -> CodeInfo:
    """Returns the decoded form of ``code`` with a handler for each instruction; cached per code object."""
    key = id(code)
    found = _CACHE.get(key)
    if found is None:
        found = CodeInfo(code, lambda _: _CACHE.pop(key))  # before another code can have the id
        for instr in found.instructions:
            instr.run = opcodes.TABLE.get(instr.name, opcodes.unsupported)
        _CACHE[key] = found
    return found
