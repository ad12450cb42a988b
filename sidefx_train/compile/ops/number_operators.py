"""Operators of torch whose numbers are 0-dim tensors: ``sidefx::huber_loss.default(Tensor, Tensor, int, Tensor)``.

Generated code cannot pass a changing number to a kernel of torch's, but can pass the tensor that holds it. The kernel
is torch's own, called with the tensors' values.

``math.gcd(n, 4)`` of a number that the graph computes has no form on tensors that is exact for every integer. For it,
an operator evaluates Python code, whose operands are 0-dim tensors on the host: integers in ``int64``, floats in
``float64``. So arithmetic between them is Python's, too, with integers of any length.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

_NAMES = (
    "_cdist_backward", "_cdist_forward", "_pdist_backward", "_pdist_forward",
    "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update_functional", "batch_norm_backward", "native_batch_norm_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward", "addbmm",
    "addmm", "addmv", "addr", "baddbmm", "bernoulli.p", "cauchy", "celu", "constant_pad_nd", "copysign.Scalar", "dist",
    "elu",
    "elu_backward", "embedding_renorm", "exponential", "geometric", "hardshrink", "hardshrink_backward", "hardtanh",
    "hardtanh_backward", "histc", "huber_loss", "huber_loss_backward", "index_add", "index_fill.int_Scalar",
    "leaky_relu", "leaky_relu_backward", "linalg_vector_norm", "log_normal", "logit", "logit_backward",
    "multi_margin_loss", "multi_margin_loss_backward", "nan_to_num", "native_dropout", "native_dropout_backward",
    "native_group_norm", "native_layer_norm", "norm.Scalar", "norm.ScalarOpt_dim", "normal.Tensor_float",
    "normal.float_Tensor", "normal_functional", "renorm", "rrelu_with_noise_backward",
    "rrelu_with_noise_functional", "scatter.value", "smooth_l1_loss", "smooth_l1_loss_backward", "softplus",
    "softplus_backward", "softshrink", "softshrink_backward", "std.correction", "std_mean.correction", "threshold",
    "threshold_backward", "uniform", "var.correction", "var_mean.correction", "xlogy.Scalar_Other",
    "xlogy.Scalar_Self", "isin.Scalar_Tensor", "isin.Tensor_Scalar", "special_xlog1py.other_scalar",
    "special_xlog1py.self_scalar", "special_zeta.other_scalar", "special_zeta.self_scalar",
    *(
        f"{resampling}{suffix}"
        for resampling in (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
            "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "upsample_trilinear3d",
        )
        for suffix in ("", "_backward")
    ),
    *(
        f"special_{polynomial}.{overload}"
        for polynomial in (
            "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
            "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
            "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
            "shifted_chebyshev_polynomial_w",
        )
        for overload in ("x_scalar", "n_scalar")
    ),
)  # fmt: skip
"""Operators that return new tensors, whose sizes do not depend on a number."""

_DRAWS = {"bernoulli_.float": "bernoulli.p", "normal_": "normal_functional"}
"""Operators that write to their first argument, if the one that returns a new tensor has another name."""

_NUMBERS = {
    "float": "Tensor",
    "Scalar": "Tensor",
    "number": "Tensor",
    "Optional[float]": "Tensor?",
    "Optional[number]": "Tensor?",
}
_TYPES = {
    "Tensor": "Tensor", "Optional[Tensor]": "Tensor?", "int": "int", "Optional[int]": "int?", "bool": "bool",
    "Optional[bool]": "bool?", "List[int]": "SymInt[]", "Optional[List[int]]": "SymInt[]?", "List[bool]": "bool[]",
}  # fmt: skip
_ANY = 0.5
"""A number with which fake tensors are computed: their sizes do not depend on it."""
_VALID = {(aten.multi_margin_loss.default, "p"): 1.0}
"""The same by operator and argument, where the operator refuses that number."""
_LIKE = {aten.multi_margin_loss_backward.default: 1}
"""Operators that cannot be computed with fake tensors, and the argument that their result is like."""


_NORMS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
    }
)
"""Operators whose second and third results, statistics of the input, have a dtype that depends on the device."""


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


class NumberOperator:
    """An operator in the namespace ``sidefx`` that calls one of torch's.

    Attributes:
        op: torch's operator.
    """

    def __init__(self, op: Any) -> None:
        self.op = op
        self.name = f"{op._schema.name.removeprefix('aten::')}_{op._overloadname}_of_tensors"
        self._arguments = op._schema.arguments
        self._kinds = [str(argument.type) for argument in self._arguments]
        self._is_number = [kind in _NUMBERS for kind in self._kinds]
        passed = [
            f"{_NUMBERS.get(kind) or _TYPES[kind]} {argument.name if argument.name != 'from' else 'low'}"
            for argument, kind in zip(self._arguments, self._kinds, strict=True)
            if kind in _NUMBERS or kind in _TYPES
        ]
        results = ", ".join("Tensor" for _ in op._schema.returns)
        results = f"({results})" if len(op._schema.returns) > 1 else results
        define_operator(
            f"{self.name}({', '.join(passed)}) -> {results}",
            self._kernel,
            key="CompositeExplicitAutograd",
            tags=tuple(tag for tag in op.tags if tag == torch.Tag.nondeterministic_seeded),
            fake=self._fake_norm if op in _NORMS else None,
            meta=None if op in _NORMS else self._fake,
        )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls it with torch's arguments, in which some numbers are 0-dim tensors.

        Raises:
            TypeError: an argument can only be passed to torch's operator.
        """
        given = []
        for i, (argument, kind) in enumerate(zip(self._arguments, self._kinds, strict=True)):
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            if kind in _NUMBERS:
                if type(value) in (int, float):
                    value = torch.full((), float(value), dtype=torch.float64)
                given.append(value)
            elif kind in _TYPES:
                given.append(value)
            elif value is not None:
                raise TypeError(f"argument {argument.name} of {self.op}")
        return getattr(torch.ops.sidefx, self.name).default(*given)

    def _call(self, given: tuple[Any, ...], number: Any) -> Any:
        rest = iter(given)
        args, kwargs = [], {}
        for argument, kind in zip(self._arguments, self._kinds, strict=True):
            value = next(rest) if kind in _NUMBERS or kind in _TYPES else None
            value = number(value, argument.name) if kind in _NUMBERS and value is not None else value
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return self.op(*args, **kwargs)

    def _kernel(self, *given: Any) -> Any:
        return self._call(given, lambda value, name: value.item())

    def _fake(self, *given: Any) -> Any:
        if self.op in _LIKE:
            return torch.empty_like(given[_LIKE[self.op]])
        if "upsample" in self.name and (made := compat.empty_resampled(self.op, *given)) is not NotImplemented:
            return made
        return self._call(given, lambda value, name: _VALID.get((self.op, name), _ANY))

    def _fake_norm(self, *given: Any) -> Any:
        """Returns fake results of a norm with the dtypes of its kernel: on the CPU, statistics of half precision are in
        the dtype of the weights."""
        made, x = list(self._fake(*given)), given[0]
        others = [value.dtype for value in given[1:] if isinstance(value, torch.Tensor) and value.dim() > 0]
        if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32 if torch.float32 in others else x.dtype
            made[1:] = [torch.empty_like(value, dtype=dtype) for value in made[1:]]
        return tuple(made)


def _known() -> dict[Any, NumberOperator]:
    ops = (_op(name) for name in _NAMES)
    return {
        op: NumberOperator(op)
        for op in ops
        if op is not None and not op._schema.is_mutable and all(str(r.type) == "Tensor" for r in op._schema.returns)
    }


OPERATORS = _known()
"""The operators, by torch's."""


def _rounded(number: torch.Tensor, digits: int) -> torch.Tensor:
    return torch.full((), round(number.item(), digits), dtype=number.dtype)


define_operator(
    "round_number(Tensor number, int digits) -> Tensor",
    _rounded,
    key="CompositeExplicitAutograd",
    meta=lambda number, digits: torch.empty_like(number),
)


def round_number(number: torch.Tensor, digits: int) -> torch.Tensor:
    """Returns a number, in a 0-dim tensor, as Python rounds it: by its decimal digits."""
    return torch.ops.sidefx.round_number.default(number, digits)  # type: ignore[no-any-return]


def call_with_tensors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls torch's operator with 0-dim tensors for some numbers; :data:`NotImplemented` if it has no such form."""
    name = op._schema.name.removeprefix("aten::")
    full = name if op._overloadname == "default" else f"{name}.{op._overloadname}"
    packet, _, overload = full.partition(".")
    in_place = full in _DRAWS or (packet.endswith("_") and not packet.startswith("_"))
    known = OPERATORS.get(_op(_DRAWS.get(full) or f"{packet[:-1]}.{overload}") if in_place else op)
    if known is None:
        return NotImplemented
    try:
        made = known(args, kwargs)
    except TypeError:
        return NotImplemented
    return args[0].copy_(made) if in_place else made


# --- Python's functions of numbers

_KINDS: dict[torch.dtype, type] = {torch.int64: int, torch.float64: float, torch.bool: bool}


@functools.lru_cache(maxsize=4096)
def _program(code: str, operands: int) -> Callable[..., Any]:
    names = ", ".join(f"a{position}" for position in range(operands))
    lines = "".join(f"    {line}\n" for line in code.split("\n"))
    space: dict[str, Any] = {"math": math, "operator": operator}
    exec(f"def program({names}):\n{lines}", space)
    return space["program"]  # type: ignore[no-any-return]


def _run(code: str, numbers: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        result = _program(code, len(numbers))(*(number.item() for number in numbers))
        if type(result) is not _KINDS[dtype]:
            raise TypeError(f"the result is of type {type(result).__name__}")
        made = torch.tensor(result, dtype=dtype, device="cpu")
    except (ValueError, TypeError, ArithmeticError, RuntimeError):  # the last of an integer of more than 64 bits
        return torch.zeros((), dtype=dtype, device="cpu"), torch.ones((), dtype=torch.bool, device="cpu")
    return made, torch.zeros((), dtype=torch.bool, device="cpu")


def _fake(code: str, numbers: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty((), dtype=dtype, device="cpu"), torch.empty((), dtype=torch.bool, device="cpu")


define_operator(
    "number_program(str code, Tensor[] numbers, ScalarType dtype) -> (Tensor result, Tensor failed)",
    _run,
    _fake,
    key="CompositeExplicitAutograd",
)

NUMBER_PROGRAM = torch.ops.sidefx.number_program.default
"""``number_program(code, numbers, dtype)`` runs the body of a Python function of ``a0, a1, ...``. If it raises, or
returns a number that is not of ``dtype``, the second result is true, and the first is zero."""
