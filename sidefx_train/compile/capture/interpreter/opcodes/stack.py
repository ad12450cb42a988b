"""Fast locals, constants and stack operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.frame import NULL, Frame

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def load_fast(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.locals[instr.arg]
    if value is NULL:
        _unbound(frame, instr.arg)
    frame.push(value)


def _unbound(frame: Frame, slot: int) -> None:
    name = frame.info.slots[slot]
    raise UnboundLocalError(f"cannot access local variable {name!r} where it is not associated with a value")


def load_slot(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(frame.locals[instr.arg])


def store_fast(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.locals[instr.arg] = frame.pop()


def delete_fast(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    if frame.locals[instr.arg] is NULL:
        _unbound(frame, instr.arg)
    frame.locals[instr.arg] = NULL


def load_fast_and_clear(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(frame.locals[instr.arg])
    frame.locals[instr.arg] = NULL


def load_fast_load_fast(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    for slot in (instr.arg, instr.value):
        value = frame.locals[slot]
        if value is NULL:
            _unbound(frame, slot)
        frame.push(value)


def store_fast_load_fast(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.locals[instr.arg] = frame.pop()
    value = frame.locals[instr.value]
    if value is NULL:
        _unbound(frame, instr.value)
    frame.push(value)


def store_fast_store_fast(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.locals[instr.arg] = frame.pop()
    frame.locals[instr.value] = frame.pop()


def load_const(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(instr.value)


def load_assertion_error(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(AssertionError)


def push_null(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(NULL)


def pop_top(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.pop()


def end_send(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    del frame.stack[-2]


def copy(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(frame.stack[-instr.arg])


def swap(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    stack, depth = frame.stack, instr.arg
    stack[-1], stack[-depth] = stack[-depth], stack[-1]


def nop(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    return None


TABLE: dict[str, Any] = {
    "LOAD_FAST": load_fast,
    "LOAD_SLOT": load_slot,
    "STORE_FAST": store_fast,
    "DELETE_FAST": delete_fast,
    "LOAD_FAST_AND_CLEAR": load_fast_and_clear,
    "LOAD_FAST_LOAD_FAST": load_fast_load_fast,
    "STORE_FAST_LOAD_FAST": store_fast_load_fast,
    "STORE_FAST_STORE_FAST": store_fast_store_fast,
    "LOAD_CONST": load_const,
    "LOAD_ASSERTION_ERROR": load_assertion_error,
    "PUSH_NULL": push_null,
    "POP_TOP": pop_top,
    "END_SEND": end_send,
    "COPY": copy,
    "SWAP": swap,
    "NOP": nop,
}
