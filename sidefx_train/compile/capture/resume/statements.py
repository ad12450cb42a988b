"""Statements of a code object: where one begins and ends, and whether it only handles data.

A step whose data decides item by item (``[x for x in xs if x is not None]``) is suspended before the whole statement,
which then runs natively, if it calls nothing but C code. So do statements before and after it that gather many tensors
into a few (``torch.cat(batch.state)``), since each tensor that a part takes must be guarded, and writes into several
arrays of one object (``self.rewards[i] = reward``).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from sidefx_train.compile.capture.interpreter import bytecode_versions
from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.resume.bridge import JUMPS
from sidefx_train.compile.capture.resume.frame_layout import CALLS, Body
from sidefx_train.compile.capture.resume.liveness import own_effect, reads
from sidefx_train.compile.capture.resume.with_blocks import bound_before, enclosing, following
from sidefx_train.compile.common.type_checks import HEAP_TYPE, safe_isinstance
from sidefx_train.errors import Unsupported

_JUMPS = frozenset({*JUMPS, "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE"})
_LOADS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_LOADS_VARIABLE = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_SLOT", "LOAD_FAST_LOAD_FAST"})
_LOADS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"})
_COMPUTES = frozenset({"BINARY_OP", "UNARY_NEGATIVE", "UNARY_INVERT"})


class DataCalls(NamedTuple):
    """What a statement that handles data may call.

    Attributes:
        tensor: the class of tensors.
        methods: names of methods, besides any function of C.
        gather: functions that make one tensor of many, and others that such a statement calls.
        gather_methods: names of methods that it calls.
        holds_items: returns True for a value in which such items are, or no tensor.
        of_arrays: the statement reads or writes arrays of NumPy, and must do nothing but gather.
    """

    tensor: type
    methods: Set[str]
    gather: tuple[Any, ...]
    gather_methods: Set[str]
    holds_items: Callable[[Any], bool]
    of_arrays: bool = False

    def is_of_c(self, fn: Any) -> bool:
        """Returns True for functions and classes of C, for those of tensors and namedtuples, and for what gathers."""
        if safe_isinstance(fn, type) and issubclass(fn, self.tensor):
            return True
        return safe_isinstance(fn, types.BuiltinFunctionType) or self.gathers(fn)

    def is_inside(self, code: types.CodeType) -> bool:
        """Returns True for the code of a comprehension, and of a function that gathers tensors: the statement that
        calls it is the one."""
        return code.co_name in _COMPREHENSIONS or any(getattr(fn, "__code__", None) is code for fn in self.gather)

    def gathers(self, fn: Any) -> bool:
        """Returns True for what gathers tensors, or helps to."""
        if safe_isinstance(fn, type):
            return not fn.__flags__ & HEAP_TYPE or _makes_tuples(fn)
        return any(fn is known for known in self.gather)


@dataclass(frozen=True)
class Statement:
    """One or more statements, or the expression with which an ``if`` or a ``return`` begins.

    Attributes:
        start: index of the first instruction.
        body: indices of the instructions.
        end: index of the instruction that follows on every way out.
    """

    start: int
    body: frozenset[int]
    end: int


def data_statement(
    code: types.CodeType,
    index: int,
    first: int,
    space: Mapping[str, Any],
    calls: DataCalls,
    is_data: Callable[[int], bool],
) -> Statement | None:
    """Returns the statement around an instruction, if it handles data alone, with those next to it that gather tensors;
    of arrays, with those that write into items of the same object.

    Args:
        code: the code.
        index: the instruction.
        first: the instruction with which the code was entered.
        space: the globals of the code.
        calls: what it may call.
        is_data: returns True for the slot of a variable that holds items such as the one at which the capture stopped,
            or no tensor: what gathers anything else belongs to the graph.

    Returns:
        The statements; ``None`` if that one calls code of the program, or if its end is not known.
    """
    depths = _depths(code)
    if depths is None or depths[index] < 0:
        return None
    instructions = code_info(code).instructions
    found = None

    def gathers(statement: Statement) -> bool:
        computes = _computes(instructions, statement)
        return not computes and _calls_only(code, statement, space, calls.gathers, calls.gather_methods)

    def handles(statement: Statement) -> bool:
        if calls.of_arrays:
            return gathers(statement)
        return _calls_only(code, statement, space, calls.is_of_c, calls.methods)

    for base in range(_base(code, depths, index), -1, -1):
        start = next((i for i in range(index, -1, -1) if depths[i] == base), None)
        around = None if start is None else _from(code, depths, start)
        if around is None or not handles(around):
            break
        if index not in around.body:  # a jump that asks for itself, at the end
            continue
        if found is None or not _computes(instructions, around):  # a loop
            found = around
    if found is None:
        return None
    owners = _written(instructions, depths, found)
    made = set(_stored(instructions, found))

    def belongs(statement: Statement) -> bool:
        if calls.of_arrays:
            return bool(owners & _written(instructions, depths, statement)) and gathers(statement)
        made.update(_stored(instructions, statement))
        read = {slot for i in statement.body for slot in reads(instructions[i])} - made
        useful = any(instructions[i].name in CALLS for i in statement.body)
        return useful and gathers(statement) and all(map(is_data, read))

    return _with_next(code, depths, _with_previous(code, depths, found, first, belongs), belongs)


def _written(instructions: list[Instruction], depths: list[int], statement: Statement) -> set[tuple[str, Any]]:
    """Returns the variables into whose items, or into those of whose attributes, a statement writes."""
    found = set()
    for index in statement.body:
        if instructions[index].name == "STORE_SUBSCR":
            loads = next(i for i in range(index - 1, -1, -1) if depths[i] == depths[index] - 2)
            found.add((instructions[loads].name, instructions[loads].arg))
    return found


def _stored(instructions: list[Instruction], statement: Statement) -> Iterator[int]:
    for index in statement.body:
        yield from own_effect(instructions[index])[0]
        if instructions[index].name == "STORE_DEREF":
            yield instructions[index].arg


def _computes(instructions: list[Instruction], statement: Statement) -> bool:
    return any(instructions[i].name in _COMPUTES for i in statement.body)


def _with_previous(
    code: types.CodeType, depths: list[int], found: Statement, first: int, belongs: Callable[[Statement], bool]
) -> Statement:
    """Adds the statements before one that belong to it, back to where the code was entered."""
    base = depths[found.start]
    at = next((i for i in range(first, found.start) if depths[i] == base), found.start)
    body: set[int] = set()
    start = at
    while at < found.start:
        before = _from(code, depths, at)
        if before is None or before.end <= at:
            return found
        body |= before.body
        at = before.end
        if not belongs(before):
            start, body = at, set()
    return Statement(start, found.body | body, found.end) if at == found.start else found


def _with_next(
    code: types.CodeType, depths: list[int], found: Statement, belongs: Callable[[Statement], bool]
) -> Statement:
    """Adds the statements after one that belong to it."""
    while depths[found.end] == depths[found.start]:
        after = _from(code, depths, found.end)
        if after is None or after.end <= found.end or not belongs(after):
            break
        found = Statement(found.start, found.body | after.body, after.end)
    return found


def bound_at_end(
    code: types.CodeType, statement: Statement, bound: Set[int]
) -> tuple[dict[int, frozenset[int]], Set[int]]:
    """Returns which variables are bound after a statement.

    Args:
        code: the code.
        statement: the statement.
        bound: slots of the variables that are bound before it.

    Returns:
        For its end the slots that are bound on every way there; and those that are bound on some way.
    """
    instructions = code_info(code).instructions
    before = bound_before(instructions, statement.start, statement.body | {statement.end}, bound)
    some = frozenset(bound).union(*(own_effect(instructions[index])[0] for index in statement.body))
    return {statement.end: before[statement.end]}, some


def _base(code: types.CodeType, depths: list[int], index: int) -> int:
    """Returns the stack depth between the statements of the block in which an instruction lies."""
    instructions = code_info(code).instructions
    around = [i for i, instr in enumerate(instructions) if instr.name == "FOR_ITER" and i < index < instr.target]
    loops = [
        i for i in around if instructions[i + 1].name not in JUMPS
    ]  # others are what 3.14 makes of ``any`` and ``all``
    base = 0
    for position in sorted([*loops, *(block.entry + 1 for block in enclosing(code, index))]):
        if depths[position] != base + 1:  # the loop of a comprehension
            break
        base += 1
    return base


def _from(code: types.CodeType, depths: list[int], start: int) -> Statement | None:
    """Returns the statement that begins at an instruction; ``None`` if it ends in several places, or where a handler of
    its exceptions may go on too."""
    instructions, base = code_info(code).instructions, depths[start]
    body: set[int] = set()
    ends: set[int] = set()
    handlers = set()
    waiting = [start]
    while waiting:
        index = waiting.pop()
        if index in body:
            continue
        body.add(index)
        handler = instructions[index].handler
        outside = handler is not None and handler[1] <= base
        if outside:
            handlers.add(handler)
        for after, raised in following(instructions, index):
            if raised and outside:
                continue
            if _is_end(instructions, depths, after, base):
                ends.add(after)
            else:
                waiting.append(after)
    if len(ends) != 1 or not handlers <= {instructions[end].handler for end in ends}:
        return None
    return Statement(start, frozenset(body), ends.pop())


def _is_end(instructions: list[Instruction], depths: list[int], index: int, base: int) -> bool:
    """Returns True for what follows a statement: the next one, or the jump or return that takes its value."""
    instr = instructions[index]
    if depths[index] == base:
        return True
    if depths[index] != base + 1:
        return False
    if instr.name in _JUMPS:
        return depths[index + 1] == base == depths[instr.target]
    return instr.name == "RETURN_VALUE"


def _calls_only(
    code: types.CodeType,
    statement: Statement,
    space: Mapping[str, Any],
    may_call: Callable[[Any], bool],
    methods: Set[str],
) -> bool:
    """Returns True for a statement that calls nothing but these functions and methods."""
    instructions = code_info(code).instructions
    return _call_only([instructions[i] for i in sorted(statement.body)], space, may_call, methods)


def _call_only(
    instructions: list[Instruction], space: Mapping[str, Any], may_call: Callable[[Any], bool], methods: Set[str]
) -> bool:
    owner: Any = None
    nulls = _nulls_of_callables(instructions)
    beside = 1 if bytecode_versions.NULL_IS_UPPER else -1
    for i, instr in enumerate(instructions):
        name, value = instr.name, instr.value
        found: Any = None
        if name in _LOADS_GLOBAL:
            found = _global(space, value)
        elif name in _LOADS_ATTRIBUTE and safe_isinstance(owner, types.ModuleType):
            found = vars(owner).get(value)
        elif (name == "LOAD_METHOD" and value not in methods) or (name in _LOADS_VARIABLE and i + beside in nulls):
            return False
        inner = code_info(value).instructions if isinstance(value, types.CodeType) else []
        if not _call_only(inner, space, may_call, methods) or (callable(found) and not may_call(found)):
            return False
        owner = found
    return True


def _nulls_of_callables(instructions: list[Instruction]) -> set[int]:
    """Returns the indices of instructions that push the empty one of a call's two callable slots."""
    nulls = {i for i, instr in enumerate(instructions) if instr.name == "PUSH_NULL"}
    if not bytecode_versions.ALWAYS_HAS_KEYWORDS:
        return nulls
    return nulls - {i - 1 for i, instr in enumerate(instructions) if instr.name == "CALL_FUNCTION_EX"}


def _global(space: Mapping[str, Any], name: str) -> Any:
    builtins = space.get("__builtins__")
    inherited = builtins if isinstance(builtins, dict) else vars(builtins) if builtins is not None else {}
    return space.get(name, inherited.get(name))


def _makes_tuples(cls: type) -> bool:
    """Returns True for the class of a ``namedtuple``."""
    return issubclass(cls, tuple) and cls.__init__ is tuple.__init__


def _depths(code: types.CodeType) -> list[int] | None:
    """Returns the stack depth before each instruction: -1 for those in handlers, and for unreachable ones."""
    try:
        levels = Body(code, suspends=True).levels
    except Unsupported:
        return None
    return [-1 if level is None or level[1] else level[0] for level in levels]
