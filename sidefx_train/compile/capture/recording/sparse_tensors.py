"""Sparse tensors of rows, as the gradients of embeddings with ``sparse=True`` are.

A graph has no sparse tensors. The fake tensor of a sparse one has no node: indices and values have nodes, and the
operators that autograd and optimizers call are recorded as operators of these. So the engine decides as in eager how
gradients are accumulated.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops import sparse_tensors as sparse_tensors  # defines the operators
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder

aten = torch.ops.aten
sidefx = torch.ops.sidefx

_MAKES = aten._sparse_coo_tensor_with_dims_and_tensors.default
_HELD = 3
"""Count of references to a tensor that only the engine holds: its own, the arguments of a call, the one counted."""
_OF_BAGS = aten._embedding_bag_backward.default


class Rows(NamedTuple):
    """What a sparse tensor of rows consists of.

    Attributes:
        indices: indices of the rows: of shape (1, number of rows).
        values: the rows.
        coalesced: the indices are sorted and none is there twice, to torch's knowledge; ``None``: as torch assumes of a
            new tensor, if there are less than two rows.
    """

    indices: torch.Tensor
    values: torch.Tensor
    coalesced: bool | None

    @property
    def count(self) -> Any:
        """Number of rows, a symbolic number if only the graph knows it."""
        return self.values.shape[0]


class SparseTensors:
    """The sparse tensors of one capture.

    Args:
        tracer: records the operators.

    Attributes:
        refused: an operator is not captured.
        leaves: a backward outside of the step would return a sparse gradient.
    """

    def __init__(self, tracer: GraphRecorder) -> None:
        self._tracer = tracer
        self._rows = WeakIdKeyDictionary()
        self._read: Any = WeakIdKeyDictionary()  # of one from outside: reads what it consists of
        self.refused = self.leaves = False

    def add(self, fake: torch.Tensor, read: Callable[[], Rows]) -> None:
        """Adds the shadow of a tensor from outside, which is read when an operator needs it."""
        self._read[fake] = read

    def rows(self, value: Any) -> Rows | None:
        """Returns what a fake tensor stands for; ``None`` for one that is not sparse."""
        read = self._read.pop(value, None)
        if read is not None:
            self._rows[value] = read()
        found: Rows | None = self._rows.get(value)
        return found

    def replace(self, fake: torch.Tensor, rows: Rows) -> None:
        """Has a sparse tensor stand for other rows."""
        self._read.pop(fake, None)
        self._rows[fake] = rows

    def concerns(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Returns True for an operator that makes a sparse tensor, or takes one."""
        if func is _MAKES or (func is _OF_BAGS and self._given(_OF_BAGS, args, kwargs)["sparse"]):
            return True
        if not self._rows and not self._read:
            return False
        return any(map(self._holds, (*args, *kwargs.values())))

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Records such an operator.

        Raises:
            Unsupported: it is not captured.
        """
        if func is _MAKES:
            return self._make(**self._given(func, args, kwargs))
        if func is _OF_BAGS:
            return self._of_bags(self._given(func, args, kwargs))
        if func is aten.clone.default and getrefcount(args[0]) <= _HELD and _accumulates():
            return self._taken_over(args[0])
        rule = _RULES.get(func)
        if rule is None:
            self.refuse(func)
        return rule(self, *args, **kwargs)

    def _taken_over(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what becomes the gradient of a leaf: a new tensor of the same parts, as in eager, if nothing else
        refers to ``x``. C++ code cannot tell for fake tensors: it asks for a copy."""
        rows = self.known(x)
        if not rows.indices.is_contiguous() or not rows.values.is_contiguous():
            return self._clone(x)
        return self._make(1, 1, x.shape, rows.indices, rows.values)

    def refuse(self, what: Any, how: str = "with a sparse tensor") -> NoReturn:
        """Stops the capture at what is not captured."""
        self.refused = True
        raise Unsupported("SFX109", f"computes {what} {how}")

    def refuse_outside(self) -> NoReturn:
        """Stops the capture of a backward that runs outside of the step, and returns a sparse gradient."""
        self.leaves = True
        raise Unsupported("SFX109", "a backward outside of the step returns a sparse gradient")

    def _holds(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._holds, value))
        return isinstance(value, torch.Tensor) and (value in self._rows or value in self._read)

    @staticmethod
    def _given(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns all arguments by name."""
        given = {argument.name: argument.default_value for argument in func._schema.arguments}
        given.update(zip(given, args, strict=False))
        return {**given, **kwargs}

    def _make(
        self,
        sparse_dim: int,
        dense_dim: int,
        size: Any,
        indices: torch.Tensor,
        values: torch.Tensor,
        is_coalesced: bool | None = None,
        **_: Any,
    ) -> torch.Tensor:
        fits = sparse_dim == dense_dim == 1 and len(size) == indices.dim() == values.dim() == 2
        if not fits or indices.dtype is not torch.int64 or values.is_complex():
            self.refuse("a sparse tensor", "that is no matrix of real rows")
        if not all(part.device.type == "cpu" and part.layout is torch.strided for part in (indices, values)):
            self.refuse("a sparse tensor", "that is not on the CPU")
        if any(type(length) is not int for length in size):
            self.refuse("a sparse tensor", "whose size changes")
        if not (_equal(indices.shape[0], 1) and _equal(indices.shape[1], values.shape[0])) or not _equal(
            values.shape[1], size[1]
        ):
            self.refuse("a sparse tensor", "whose indices and values do not fit, to the capture's knowledge")
        coalesced = is_coalesced
        if coalesced is None:
            coalesced = _less_than_two(values.shape[0])
        return self._new(size, Rows(aten.detach.default(indices), aten.detach.default(values), coalesced))

    def _new(self, size: Any, rows: Rows) -> torch.Tensor:
        made = compat.sparse_fake(self._tracer.fake_mode, tuple(size), rows.values.dtype)
        self._rows[made] = rows
        return made

    def _with(self, x: torch.Tensor, rows: Rows, values: torch.Tensor) -> torch.Tensor:
        """Returns a sparse tensor of the shape of ``x`` with other values in these rows."""
        return self._new(x.shape, rows._replace(indices=aten.clone.default(rows.indices), values=values))

    def _of_bags(self, given: dict[str, Any]) -> torch.Tensor:
        """The derivative of ``embedding_bag``: torch composes it of other operators."""
        if given.pop("scale_grad_by_freq") or not given.pop("sparse"):
            self.refuse(_OF_BAGS, "with scaled gradients")
        indices, padding = given["indices"], given.pop("padding_idx")
        values = sidefx.sparse_bag_gradient.default(*given.values())
        if padding is not None and padding >= 0:
            kept = [aten.ne.Scalar(indices, padding)]
            indices, values = aten.index.Tensor(indices, kept), aten.index.Tensor(values, kept)
        size = (given["num_weights"], values.shape[1])
        return self._make(1, 1, size, aten.view.default(indices, [1, -1]), values)

    # operators of sparse tensors

    def known(self, value: Any) -> Rows:
        """Returns what a sparse tensor stands for."""
        rows = self.rows(value)
        if rows is None:
            self.refuse("an operator", "of a dense and a sparse tensor")
        return rows

    def _indices(self, x: torch.Tensor) -> torch.Tensor:
        return self.known(x).indices

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        return self.known(x).values

    def _of_coalesced(self, place: int, x: torch.Tensor) -> torch.Tensor:
        rows = self.known(x)
        if not rows.coalesced:
            self.refuse("the indices or values", "of a sparse tensor that is not coalesced")
        return rows[place]  # type: ignore[return-value]

    def _is_coalesced(self, x: torch.Tensor) -> bool:
        rows = self.known(x)
        if rows.coalesced is not None:
            return rows.coalesced
        return bool(rows.count < 2)  # an error of torch's, if only the graph knows

    def _coalesce(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.known(x)
        if type(rows.count) is int and rows.count < 2:
            made = aten.clone.default(rows.indices), aten.clone.default(rows.values)
        else:
            made = sidefx.sparse_coalesce.default(rows.indices, rows.values, list(x.shape))
        return self._new(x.shape, Rows(*made, True))

    def coalesce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x.coalesce()``, which need not know whether there are two rows."""
        return x if self.known(x).coalesced else self._coalesce(x)

    def _mark(self, x: torch.Tensor, coalesced: bool) -> torch.Tensor:
        self._rows[x] = self.known(x)._replace(coalesced=coalesced)
        return x

    def _clone(self, x: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
        rows = self.known(x)
        return self._with(x, rows, aten.clone.default(rows.values))

    def _detach(self, x: torch.Tensor) -> torch.Tensor:
        return self._new(x.shape, self.known(x))

    def _zero_(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.known(x)
        empty = (rows.indices.new_empty(1, 0), rows.values.new_empty(0, *x.shape[1:]))
        self._rows[x] = Rows(*empty, True)
        return x

    def _to_dense(self, x: torch.Tensor, dtype: Any = None, masked_grad: Any = None) -> torch.Tensor:
        rows = self.known(x)
        if dtype not in (None, x.dtype):
            self.refuse(aten._to_dense.default, "to another dtype")
        return self._added_to(aten.zeros.default(list(x.shape), dtype=x.dtype, device=x.device), rows, 1)

    def _mask(self, dense: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = self.known(mask)
        if self.rows(dense) is not None or dense.shape != mask.shape or dense.dtype is not mask.dtype:
            self.refuse(aten.sparse_mask.default, "of other tensors")
        values = sidefx.sparse_gather.default(dense, rows.indices)
        return self._new(mask.shape, Rows(aten.clone.default(rows.indices), values, rows.coalesced))

    def _add(self, a: torch.Tensor, b: Any, *, alpha: Any = 1) -> torch.Tensor:
        of_a, of_b = self._operands(a, b)
        if of_a is None:
            start = aten.clone.default(a, memory_format=torch.contiguous_format)
            return self._added_to(start, of_b, alpha)
        return self._new(a.shape, self._sum(of_a, of_b, a.shape, alpha))

    def _add_(self, a: torch.Tensor, b: Any, *, alpha: Any = 1) -> torch.Tensor:
        of_a, of_b = self._operands(a, b)
        if of_a is None:
            return self._added_to(a, of_b, alpha)
        self._rows[a] = self._sum(of_a, of_b, a.shape, alpha)
        return a

    def _operands(self, a: Any, b: Any) -> tuple[Rows | None, Rows]:
        """Returns what the operands of a sum consist of; ``None`` for a dense first one."""
        same = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype is b.dtype
        if not same or a.device != b.device:
            self.refuse(aten.add.Tensor, "of tensors that differ in shape or dtype")
        return self.rows(a), self.known(b)

    def _added_to(self, dense: torch.Tensor, rows: Rows, alpha: Any) -> torch.Tensor:
        """Adds rows to a dense tensor in place."""
        return sidefx.sparse_add_.default(dense, rows.indices, rows.values, bool(rows.coalesced), alpha)  # type: ignore[no-any-return]

    def _sum(self, a: Rows, b: Rows, size: Any, alpha: Any) -> Rows:
        """Returns the sum of two, as eager's kernel makes it."""
        if type(b.count) is int and b.count == 0:
            return Rows(aten.clone.default(a.indices), aten.clone.default(a.values), a.coalesced)
        if type(a.count) is int and a.count == 0:
            return Rows(aten.clone.default(b.indices), aten.mul.Scalar(b.values, alpha), b.coalesced)
        a, b = (x._replace(coalesced=bool(x.count < 2)) if x.coalesced is None else x for x in (a, b))
        if a.values.is_contiguous() and b.values.is_contiguous():
            made = sidefx.sparse_sum.default(*a, *b, list(size), alpha)
            return Rows(made[0], made[1], a.coalesced and b.coalesced)
        added = b.values if type(alpha) in (int, float) and alpha == 1 else aten.mul.Scalar(b.values, alpha)
        indices = aten.cat.default([a.indices, b.indices], 1)
        return Rows(indices, aten.cat.default([a.values, added]), False)

    def _sub(self, a: torch.Tensor, b: Any, *, alpha: Any = 1) -> torch.Tensor:
        return self._add(a, b, alpha=-alpha)

    def _sub_(self, a: torch.Tensor, b: Any, *, alpha: Any = 1) -> torch.Tensor:
        return self._add_(a, b, alpha=-alpha)

    def _power(self, x: torch.Tensor, exponent: Any) -> torch.Tensor:
        if type(exponent) not in (int, float) or exponent == 0:
            self.refuse(aten.pow.Tensor_Scalar, "of a sparse tensor, to a power that is zero or changes")
        return _of_sums(aten.pow.Tensor_Scalar)(self, x, exponent)

    def _total(self, x: torch.Tensor, *, dtype: Any = None) -> torch.Tensor:
        return aten.sum.default(self.known(x).values, dtype=dtype)  # type: ignore[no-any-return]

    def _any(self, x: torch.Tensor) -> torch.Tensor:
        return aten.any.default(self.known(x).values)  # type: ignore[no-any-return]

    def _norm(self, x: torch.Tensor, p: Any = 2, dim: Any = (), keepdim: bool = False) -> torch.Tensor:
        if (
            keepdim
            or not (type(p) in (int, float) or p is None)
            or sorted(each % x.dim() for each in dim) not in ([], [0, 1])
        ):
            self.refuse(aten.norm.ScalarOpt_dim, "of some dimensions of a sparse tensor, or of a power that changes")
        return aten.linalg_vector_norm.default(self.known(self.coalesce(x)).values, 2 if p is None else p)  # type: ignore[no-any-return]

    def _converted(self, x: torch.Tensor, *, dtype: Any = None, device: Any = None, **other: Any) -> torch.Tensor:
        if dtype is None or torch.device(device or "cpu").type != "cpu" or any(other.values()) or dtype.is_complex:
            self.refuse(aten._to_copy.default, "of a sparse tensor to what has no dtype of real numbers on the CPU")
        rows = self.known(x)
        return self._with(x, rows, aten._to_copy.default(rows.values, dtype=dtype))

    def _zeros(self, x: torch.Tensor, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        rows = self.known(x)
        values = rows.values.new_empty(0, *x.shape[1:], dtype=dtype or x.dtype)
        return self._new(x.shape, Rows(rows.indices.new_empty(1, 0), values, True))


def _accumulates() -> bool:
    """Returns True while autograd sets the gradient of a leaf, which is not to be differentiated."""
    return not torch.is_grad_enabled() and compat.running_node() == "torch::autograd::AccumulateGrad"


def _equal(a: Any, b: Any) -> bool:
    """Returns True for numbers that are equal, or of which it is known that they are."""
    equal = a == b
    return bool(compat.known_truth(equal) if isinstance(equal, torch.SymBool) and compat.is_unbacked(equal) else equal)


def _less_than_two(count: Any) -> bool | None:
    """Returns whether a number of rows is less than two; ``None`` if only the graph knows."""
    less = count < 2
    return compat.known_truth(less) if isinstance(less, torch.SymBool) and compat.is_unbacked(less) else bool(less)


def _is_number(value: Any) -> bool:
    """Returns True for a number, also in a tensor of no dimension."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.layout is torch.strided and value.is_floating_point()
    return isinstance(value, (int, float, torch.SymFloat, torch.SymInt))


def _on_values(op: Any) -> Callable[..., torch.Tensor]:
    """Returns the rule of an operator that computes each value, whose other arguments are numbers."""

    def rule(tensors: SparseTensors, x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        rows = tensors.known(x)
        if not all(map(_is_number, numbers)):
            tensors.refuse(op, "of two tensors")
        values = op(rows.values, *numbers)
        if values.dtype is not rows.values.dtype:
            tensors.refuse(op, "to another dtype")
        return tensors._with(x, rows, values)

    return rule


def _of_sums(op: Any) -> Callable[..., torch.Tensor]:
    """Returns the rule of an operator that computes each element, where rows of equal indices are added first."""

    def rule(tensors: SparseTensors, x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        rows = tensors.known(tensors.coalesce(x))
        return tensors._with(x, rows, op(rows.values, *numbers))

    return rule


def _into(op: Any) -> Callable[..., torch.Tensor]:
    """The same for one that writes to its operand. Eager's kernel gives it new values, unlike that of ``div_``."""
    compute = _on_values(op)

    def rule(tensors: SparseTensors, x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        made = tensors.known(compute(tensors, x, *numbers))
        tensors.replace(x, made._replace(coalesced=False))
        return x

    return rule


def _in_place(op: Any) -> Callable[..., torch.Tensor]:
    """The same for one that writes to the values."""

    def rule(tensors: SparseTensors, x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        if not all(map(_is_number, numbers)):
            tensors.refuse(op, "of two tensors")
        op(tensors.known(x).values, *numbers)
        return x

    return rule


_OF_SUMS = (
    "abs asin asinh atan atanh ceil erf expm1 floor frac isinf isnan isneginf isposinf log1p nan_to_num relu round sgn "
    "sign signbit sin sinh sqrt tan tanh trunc"
)
_RULES: dict[Any, Callable[..., Any]] = {
    aten._indices.default: SparseTensors._indices,
    aten._values.default: SparseTensors._values,
    aten.indices.default: lambda tensors, x: tensors._of_coalesced(0, x),
    aten.values.default: lambda tensors, x: tensors._of_coalesced(1, x),
    aten.is_coalesced.default: SparseTensors._is_coalesced,
    aten._coalesced_.default: SparseTensors._mark,
    aten._coalesce.default: SparseTensors._coalesce,
    aten._nnz.default: lambda tensors, x: tensors.known(x).count,
    aten.sparse_dim.default: lambda tensors, x: 1,
    aten.dense_dim.default: lambda tensors, x: x.dim() - 1,
    aten._dimI.default: lambda tensors, x: 1,
    aten._dimV.default: lambda tensors, x: x.dim() - 1,
    aten.clone.default: SparseTensors._clone,
    aten.detach.default: SparseTensors._detach,
    aten.alias.default: SparseTensors._detach,
    aten.zero_.default: SparseTensors._zero_,
    aten._to_dense.default: SparseTensors._to_dense,
    aten.sparse_mask.default: SparseTensors._mask,
    aten.add.Tensor: SparseTensors._add,
    aten.add_.Tensor: SparseTensors._add_,
    aten.sub.Tensor: SparseTensors._sub,
    aten.sub_.Tensor: SparseTensors._sub_,
    aten.neg.default: _on_values(aten.neg.default),
    aten.mul.Tensor: _on_values(aten.mul.Tensor),
    aten.mul.Scalar: _on_values(aten.mul.Scalar),
    aten.div.Tensor: _on_values(aten.div.Tensor),
    aten.div.Scalar: _on_values(aten.div.Scalar),
    aten.mul_.Tensor: _into(aten.mul.Tensor),
    aten.mul_.Scalar: _into(aten.mul.Scalar),
    aten.div_.Tensor: _in_place(aten.div_.Tensor),
    aten.div_.Scalar: _in_place(aten.div_.Scalar),
    aten.pow.Tensor_Scalar: SparseTensors._power,
    aten.sum.default: SparseTensors._total,
    aten.any.default: SparseTensors._any,
    aten.norm.ScalarOpt_dim: SparseTensors._norm,
    aten._to_copy.default: SparseTensors._converted,
    aten.zeros_like.default: SparseTensors._zeros,
    **{op: _of_sums(op) for op in (getattr(aten, name).default for name in _OF_SUMS.split())},
}
