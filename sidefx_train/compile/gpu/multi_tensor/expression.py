"""Elementwise expressions: the new values of some tensors, computed from tensors of one layout and from numbers.

Every operation is computed in float32 (float64 for float64) and its result is rounded to its dtype: the order of
rounding of torch's operators called one by one. Quotients and roots are rounded correctly. A product is contracted with
a sum only within one operator, as CUDA's kernels of ``add(alpha=)``, ``addcmul`` and ``addcdiv`` are: ``fma(b, alpha,
a)``, ``fma(value, b * c, a)``, ``fma(value, b / c, a)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Operand = int | str
"""The index of a value, or the literal of a number: equal numbers such as 0.0 and -0.0 have different literals."""

DTYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.bool: "tl.int1",
}
"""Dtypes of values, and their names in Triton."""


@dataclass(frozen=True)
class Operation:
    """An operation of an expression.

    Attributes:
        triton: ``triton(*operands)`` returns its source.
        torch: computes it on tensors.
        compares: it is computed in the dtype of its operands, not of its result.
    """

    triton: Callable[..., str]
    torch: Callable[..., torch.Tensor]
    compares: bool = False


def _infix(sign: str) -> Callable[..., str]:
    return lambda a, b: f"{a} {sign} {b}"


def _extremum(name: str) -> Callable[..., str]:
    return lambda a, b: f"tl.{name}({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

OPERATIONS: dict[str, Operation] = {
    "add": Operation(_infix("+"), torch.add),
    "sub": Operation(_infix("-"), torch.sub),
    "add_scaled": Operation(lambda a, b, alpha: f"tl.fma({b}, {alpha}, {a})", lambda a, b, alpha: a + b * alpha),
    "addcmul": Operation(lambda a, b, c: f"tl.fma({b}, {c}, {a})", torch.addcmul),
    "addcmul_scaled": Operation(
        lambda a, b, c, value: f"tl.fma({value}, {b} * {c}, {a})", lambda a, b, c, value: a + value * (b * c)
    ),
    "addcdiv": Operation(lambda a, b, c: f"{a} + divided({b}, {c})", torch.addcdiv),
    "addcdiv_scaled": Operation(
        lambda a, b, c, value: f"tl.fma({value}, divided({b}, {c}), {a})", lambda a, b, c, value: a + value * (b / c)
    ),
    "mul": Operation(_infix("*"), torch.mul),
    "div": Operation(lambda a, b: f"divided({a}, {b})", torch.div),
    "pow": Operation(lambda a, b: f"libdevice.pow({a}, {b})", torch.pow),
    "square": Operation(lambda a: f"{a} * {a}", torch.square),
    "neg": Operation(lambda a: f"-{a}", torch.neg),
    "abs": Operation(lambda a: f"tl.abs({a})", torch.abs),
    "sign": Operation(lambda a: f"signum({a})", torch.sign),
    "sqrt": Operation(lambda a: f"root({a})", torch.sqrt),
    "rsqrt": Operation(lambda a: f"inverse(root({a}))", torch.rsqrt),
    "reciprocal": Operation(lambda a: f"inverse({a})", torch.reciprocal),
    "maximum": Operation(_extremum("maximum"), torch.maximum),
    "minimum": Operation(_extremum("minimum"), torch.minimum),
    "where": Operation(lambda flag, a, b: f"tl.where({flag}, {a}, {b})", torch.where),
    "logical_not": Operation(lambda a: f"{a} == 0", torch.logical_not, compares=True),
    "logical_and": Operation(lambda a, b: f"({a} != 0) & ({b} != 0)", torch.logical_and, compares=True),
    "logical_or": Operation(lambda a, b: f"({a} != 0) | ({b} != 0)", torch.logical_or, compares=True),
    "cast": Operation(lambda a: a, lambda a: a),
    **{name: Operation(_infix(sign), getattr(torch, name), compares=True) for name, sign in _COMPARISONS.items()},
}
"""What an expression can consist of, by name."""


@dataclass(frozen=True)
class Slot:
    """A value that is read.

    Attributes:
        dtype: its dtype in memory.
        is_number: it is one element, else as many as the tensors that are written.
    """

    dtype: torch.dtype
    is_number: bool


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: a key of :data:`OPERATIONS`.
        operands: its operands.
        dtype: dtype of its result.
    """

    name: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Expression:
    """New values of one or several tensors. Expressions of equal structure are equal.

    Attributes:
        slots: the values that are read; their indices come first.
        steps: the operations, in order; their indices follow.
        results: the new values by index, or literals.
        dtypes: dtypes of the tensors that are written.
    """

    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]
    dtypes: tuple[torch.dtype, ...]

    def dtype_of(self, index: int) -> torch.dtype:
        """Returns the dtype of a value."""
        read = len(self.slots)
        return self.slots[index].dtype if index < read else self.steps[index - read].dtype

    def computed_in(self, step: Step) -> torch.dtype:
        """Returns the dtype to which the operands of a step are converted."""
        known = [step.dtype]
        if OPERATIONS[step.name].compares:
            known = [self.dtype_of(each) for each in step.operands if isinstance(each, int)]
        if step.name in ("where", "cast"):
            return step.dtype
        if torch.float64 in known:
            return torch.float64
        if any(each.is_floating_point for each in known):
            return torch.float32
        return torch.int64

    def run(self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
        """Writes the new values of one group of tensors, by torch's operators.

        Args:
            written: one tensor for each result.
            read: one tensor for each slot; nothing else shares its memory.
        """
        values = list(read)
        for step in self.steps:
            dtype = self.computed_in(step)
            given = [self._operand(each, values, dtype, written[0]) for each in step.operands]
            if step.name == "where":
                given[0] = values[step.operands[0]].to(torch.bool)  # type: ignore[index]
            values.append(OPERATIONS[step.name].torch(*given).to(step.dtype))
        new = [self._operand(each, values, t.dtype, t) for each, t in zip(self.results, written, strict=True)]
        for tensor, value in zip(written, new, strict=True):
            tensor.copy_(value)

    def _operand(
        self, operand: Operand, values: list[torch.Tensor], dtype: torch.dtype, like: torch.Tensor
    ) -> torch.Tensor:
        if isinstance(operand, int):
            return values[operand].to(dtype)
        return torch.full((), number_of(operand), dtype=dtype, device=like.device)


def literal_of(number: float | bool) -> str:
    """Returns the literal of a number, as :class:`Step` has it."""
    return repr(number) if number == number and abs(number) != float("inf") else f'float("{number}")'


def number_of(literal: str) -> float:
    """Returns the number of a literal."""
    return float(literal.removeprefix('float("').removesuffix('")')) if "float" in literal else eval(literal, {})


_HEAD = """\
def multi_tensor_update(table, BLOCK: tl.constexpr):
    count = tl.load(table)
    chunk = tl.load(table + 1 + tl.program_id(0))
    tensor, start = chunk >> {shift}, chunk & {mask}
    sizes = table + 1 + tl.num_programs(0)
    addresses = sizes + count + tensor
    index = start + tl.arange(0, BLOCK)
    inside = index < tl.load(sizes + tensor)
"""

CHUNK_SHIFT = 40
"""Bits of an entry of the table of chunks for the first element; the index of the tensor is above them."""


def triton_source(expression: Expression) -> str:
    """Returns the source of a Triton kernel whose programs update one chunk of one tensor each.

    The kernel's only argument is an address table (:mod:`~sidefx_train.compile.gpu.multi_tensor.address_table`): the
    addresses of the tensors that are written, slot by slot, then of those that are read.
    """
    writer = _Writer(expression)
    body = "".join(f"    {line}\n" for line in writer.lines)
    return _HEAD.format(shift=CHUNK_SHIFT, mask=2**CHUNK_SHIFT - 1) + body


class _Writer:
    """Writes the lines of an expression."""

    def __init__(self, expression: Expression) -> None:
        self._expression = expression
        self.lines: list[str] = []
        self._blocks: list[bool] = []
        """Whether each value has one element for each of a chunk."""
        for slot in expression.slots:
            self._load(slot)
        for step in expression.steps:
            self._compute(step)
        for position, result in enumerate(expression.results):
            self._store(position, result)

    def _address(self, place: int, dtype: torch.dtype) -> str:
        kind = "tl.int8" if dtype == torch.bool else DTYPES[dtype]
        return f"tl.load(addresses + {place} * count).to(tl.pointer_type({kind}))"

    def _load(self, slot: Slot) -> None:
        index = len(self._blocks)
        address = self._address(len(self._expression.results) + index, slot.dtype)
        text = f"tl.load({address})" if slot.is_number else f"tl.load({address} + index, inside)"
        self.lines.append(f"v{index} = {text}" if slot.dtype != torch.bool else f"v{index} = {text} != 0")
        self._blocks.append(not slot.is_number)

    def _compute(self, step: Step) -> None:
        dtype = self._expression.computed_in(step)
        given = [self._operand(each, dtype) for each in step.operands]
        if step.name == "where":
            given[0] = self._operand(step.operands[0], torch.bool)
        text = OPERATIONS[step.name].triton(*given)
        self.lines.append(f"v{len(self._blocks)} = ({text}).to({DTYPES[step.dtype]})")
        self._blocks.append(any(self._blocks[each] for each in step.operands if isinstance(each, int)))

    def _operand(self, operand: Operand, dtype: torch.dtype) -> str:
        if isinstance(operand, str):
            return f"tl.full([], {operand}, {DTYPES[dtype]})"
        return f"v{operand}" if self._expression.dtype_of(operand) == dtype else f"v{operand}.to({DTYPES[dtype]})"

    def _store(self, position: int, result: Operand) -> None:
        dtype = self._expression.dtypes[position]
        value = self._operand(result, dtype)
        if dtype == torch.bool:
            value = f"({value}).to(tl.int8)"
        if isinstance(result, str) or not self._blocks[result]:
            value = f"tl.broadcast_to({value}, [BLOCK])"
        self.lines.append(f"tl.store({self._address(position, dtype)} + index, {value}, inside)")
