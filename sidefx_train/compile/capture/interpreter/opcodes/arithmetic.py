"""Unary and binary operators, comparison, subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.frame import Frame
from sidefx_train.compile.capture.interpreter.object_model import operators

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def binary_op(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    right = frame.pop()
    frame.stack[-1] = operators.binary(interp, instr.value, frame.stack[-1], right)


def compare_op(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    right = frame.pop()
    frame.stack[-1] = operators.compare(interp, instr.value, frame.stack[-1], right)


def is_op(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    right = frame.pop()
    answer = operators.identical(interp, frame.stack[-1], right)
    frame.stack[-1] = (not answer) if instr.arg else answer


def contains_op(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    container = frame.pop()
    answer = operators.contains(interp, container, frame.stack[-1])
    frame.stack[-1] = (not operators.truth(interp, answer)) if instr.arg else answer


def unary_not(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = not operators.truth(interp, frame.stack[-1])


def to_bool(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = operators.truth(interp, frame.stack[-1])


def unary_negative(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = operators.unary(interp, "neg", frame.stack[-1])


def unary_positive(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = operators.unary(interp, "pos", frame.stack[-1])


def unary_invert(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = operators.unary(interp, "invert", frame.stack[-1])


def binary_subscr(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    key = frame.pop()
    frame.stack[-1] = operators.getitem(interp, frame.stack[-1], key)


def store_subscr(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value, obj, key = frame.take(3)
    operators.setitem(interp, obj, key, value)


def delete_subscr(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    obj, key = frame.take(2)
    operators.delitem(interp, obj, key)


def binary_slice(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    obj, start, stop = frame.take(3)
    frame.push(operators.getitem(interp, obj, slice(start, stop)))


def store_slice(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value, obj, start, stop = frame.take(4)
    operators.setitem(interp, obj, slice(start, stop), value)


TABLE: dict[str, Any] = {
    "BINARY_OP": binary_op,
    "COMPARE_OP": compare_op,
    "IS_OP": is_op,
    "CONTAINS_OP": contains_op,
    "UNARY_NOT": unary_not,
    "TO_BOOL": to_bool,
    "UNARY_NEGATIVE": unary_negative,
    "UNARY_POSITIVE": unary_positive,
    "UNARY_INVERT": unary_invert,
    "BINARY_SUBSCR": binary_subscr,
    "STORE_SUBSCR": store_subscr,
    "DELETE_SUBSCR": delete_subscr,
    "BINARY_SLICE": binary_slice,
    "STORE_SLICE": store_slice,
}
