"""Jumps, loops, returning and yielding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.bytecode_versions import SEND_KEEPS_RECEIVER
from sidefx_train.compile.capture.interpreter.frame import RETURNED, YIELDED, Frame
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.interpreter.object_model import iteration, operators
from sidefx_train.compile.capture.interpreter.opcodes.raising_branches import raising_truth
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def jump(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.pc = instr.target


def pop_jump_if_false(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.pop()
    if value is False or (value is not True and not _decided(interp, frame, instr, value)):
        frame.pc = instr.target


def pop_jump_if_true(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.pop()
    if value is True or (value is not False and _decided(interp, frame, instr, value)):
        frame.pc = instr.target


def _decided(interp: InterpreterAPI, frame: Frame, instr: Instruction, value: Any) -> Any:
    """Returns the truth of a condition; if only the graph knows it, assumes the branch that does not only raise, or the
    usual one."""
    try:
        return operators.truth(interp, value)
    except Unsupported as stop:
        if stop.code != "SFX101":
            raise
        raising = raising_truth(frame.info, instr, frame.pc)
        usual = interp.world.usual_truth(frame) if raising is None else not raising
        if usual is None or not interp.world.grant(value, usual):
            raise
        return usual


def jump_if_false_or_pop(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    if operators.truth(interp, frame.stack[-1]):
        frame.pop()
    else:
        frame.pc = instr.target


def jump_if_true_or_pop(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    if operators.truth(interp, frame.stack[-1]):
        frame.pc = instr.target
    else:
        frame.pop()


def pop_jump_if_none(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    if operators.identical(interp, frame.pop(), None):
        frame.pc = instr.target


def pop_jump_if_not_none(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    if not operators.identical(interp, frame.pop(), None):
        frame.pc = instr.target


def get_iter(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = iteration.get_iter(interp, frame.stack[-1])


def for_iter(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    item = iteration.step(interp, frame.stack[-1])
    if item is ABSENT:
        frame.pop()
        frame.pc = instr.target
    else:
        frame.push(item)


def end_for(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    raise AssertionError("END_FOR is skipped when a loop ends")


def return_value(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> int:
    frame.result = frame.pop()
    return _returned(frame)


def return_const(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> int:
    frame.result = instr.value
    return _returned(frame)


def _returned(frame: Frame) -> int:
    frame.done = True
    frame.locals.clear()  # variables are released before the caller continues
    return RETURNED


def return_generator(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> int:
    frame.result = InterpretedGenerator(interp, frame)
    return RETURNED


def yield_value(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> int:
    frame.result = frame.pop()
    return YIELDED


def get_yield_from_iter(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = iteration.get_iter(interp, frame.stack[-1])


def send(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.pop()
    receiver = frame.stack[-1]
    if type(receiver) is InterpretedGenerator:
        signal = receiver.advance(value)
        result, receiver.frame.result = receiver.frame.result, None
        ended = signal == RETURNED
    else:
        ended = False
        try:
            if value is None:
                result = iteration.step_or_raise(interp, receiver)
            else:
                result = interp.call(interp.getattr(receiver, "send"), (value,), {})
        except StopIteration as stop:
            interp.in_flight = None
            ended, result = True, stop.value
    if ended:
        if not SEND_KEEPS_RECEIVER:
            frame.pop()
        frame.pc = instr.target
    frame.push(result)


def asynchronous(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    raise Unsupported("SFX111", f"asynchronous code ({instr.name})")


TABLE: dict[str, Any] = {
    "JUMP": jump,
    "POP_JUMP_IF_FALSE": pop_jump_if_false,
    "POP_JUMP_IF_TRUE": pop_jump_if_true,
    "JUMP_IF_FALSE_OR_POP": jump_if_false_or_pop,
    "JUMP_IF_TRUE_OR_POP": jump_if_true_or_pop,
    "POP_JUMP_IF_NONE": pop_jump_if_none,
    "POP_JUMP_IF_NOT_NONE": pop_jump_if_not_none,
    "GET_ITER": get_iter,
    "FOR_ITER": for_iter,
    "END_FOR": end_for,
    "RETURN_VALUE": return_value,
    "RETURN_CONST": return_const,
    "RETURN_GENERATOR": return_generator,
    "YIELD_VALUE": yield_value,
    "GET_YIELD_FROM_ITER": get_yield_from_iter,
    "SEND": send,
}
for _name in (
    "GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH", "END_ASYNC_FOR", "ASYNC_GEN_WRAP",
):  # fmt: skip
    TABLE[_name] = asynchronous
