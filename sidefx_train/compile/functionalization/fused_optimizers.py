"""Fused optimizer updates that must stay inside the graph, since later nodes depend on them.

Run op by op, they are called in their functional form: eager's kernel, bitwise. For a compiler they are decomposed into
tensor arithmetic; formulas and order of operations are those of PyTorch's documentation of Adagrad, Adam, AdamW and
SGD. As in eager's kernels, half precision is computed in float32, and rounded where it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.functionalization.tensor_scalar_ops import TensorScalar
from sidefx_train.errors import BackendError

Tensors = Sequence[torch.Tensor]


def _number(value: Any, like: torch.Tensor) -> Any:
    """Returns a Python number, or a 0-dim tensor with the dtype of ``like``."""
    if isinstance(value, TensorScalar):
        value = value.value
    return value.to(like.dtype) if isinstance(value, torch.Tensor) else value


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, TensorScalar) else value


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns tensors in the dtype in which kernels compute with them."""
    return [each.to(compat.elementwise_dtypes(each)[0]) for each in tensors]


def _unscale(grad: torch.Tensor, grad_scale: Any, maximize: bool) -> torch.Tensor:
    (wide,) = _wide(grad)
    if grad_scale is not None:
        wide = wide / grad_scale
        grad.copy_(wide)
    return -wide if maximize else wide


def _commit(target: torch.Tensor, value: torch.Tensor, found_inf: Any) -> None:
    value = value.to(target.dtype)
    target.copy_(value if found_inf is None else torch.where(found_inf.reshape(()) == 1, target, value))


def _adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    decoupled: bool,
    lr: Any,
    beta1: Any,
    beta2: Any,
    weight_decay: Any,
    eps: Any,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> None:
    lr, beta1, beta2, weight_decay = _bare(lr), _bare(beta1), _bare(beta2), _bare(weight_decay)
    corrections: dict[int, tuple[Any, Any]] = {}
    for i, (param, grad, mean, square, step) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True)
    ):
        p, m, v = _wide(param, mean, square)
        if id(step) not in corrections:
            exact = step.to(torch.float64)
            corrections[id(step)] = (lr / (1 - torch.pow(beta1, exact)), torch.sqrt(1 - torch.pow(beta2, exact)))
        step_size, root = corrections[id(step)]
        g = _unscale(grad, grad_scale, maximize)
        value = p
        decays = not isinstance(weight_decay, (int, float)) or weight_decay != 0
        if decays and decoupled:
            value = p * _number(1 - lr * weight_decay, p)
        elif decays:
            g = g + p * _number(weight_decay, p)
        new_m = m + (g - m) * _number(1 - beta1, m)
        new_v = v * _number(beta2, v) + (g * _number(1 - beta2, v)) * g
        largest = new_v
        if amsgrad:
            largest = torch.maximum(*_wide(max_exp_avg_sqs[i]), new_v)
            _commit(max_exp_avg_sqs[i], largest, found_inf)
        denominator = torch.sqrt(largest) / _number(root, p) + _number(eps, p)
        _commit(mean, new_m, found_inf)
        _commit(square, new_v, found_inf)
        _commit(param, value - _number(step_size, p) * new_m / denominator, found_inf)


def _sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    *,
    weight_decay: Any,
    momentum: Any,
    lr: Any,
    dampening: Any,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> None:
    momentum, dampening = _bare(momentum), _bare(dampening)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        (p,) = _wide(param)
        g = _unscale(grad, grad_scale, maximize)
        if not isinstance(weight_decay, (int, float)) or weight_decay != 0:
            g = g + p * _number(weight_decay, p)
        if len(buffers):
            (old,) = _wide(buffers[i])
            buffer = g if is_first_step else old * _number(momentum, p) + g * _number(1 - dampening, p)
            _commit(buffers[i], buffer, found_inf)
            g = g + buffer * _number(momentum, p) if nesterov else buffer
        _commit(param, p - _number(lr, p) * g, found_inf)


def _adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    state_steps: Tensors,
    *,
    lr: Any,
    lr_decay: Any,
    weight_decay: Any,
    eps: Any,
    maximize: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> None:
    lr, lr_decay, weight_decay = _bare(lr), _bare(lr_decay), _bare(weight_decay)
    for param, grad, stored, step in zip(params, grads, sums, state_steps, strict=True):
        p, total = _wide(param, stored)
        g = _unscale(grad, grad_scale, maximize)
        if not isinstance(weight_decay, (int, float)) or weight_decay != 0:
            g = g + p * _number(weight_decay, p)
        new_total = total + g * g
        _commit(stored, new_total, found_inf)
        step_size = lr / (1 + (step.to(torch.float64) - 1) * lr_decay)
        denominator = torch.sqrt(new_total) + _number(_bare(eps), p)
        _commit(param, p - _number(step_size, p) * g / denominator, found_inf)


def fused_update(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a fused optimizer operation as plain tensor operations.

    Raises:
        BackendError: the operation is not one of Adagrad, Adam, AdamW and SGD.
    """
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    name = op._schema.name.split("::")[1]
    params, grads = given.pop("self"), given.pop("grads")
    if name in ("_fused_adam_", "_fused_adamw_"):
        lists = [given.pop(k) for k in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")]
        _adam(params, grads, *lists, decoupled=name == "_fused_adamw_", **given)
    elif name == "_fused_sgd_":
        _sgd(params, grads, given.pop("momentum_buffer_list"), **given)
    elif name == "_fused_adagrad_":
        _adagrad(params, grads, given.pop("state_sums"), given.pop("state_steps"), **given)
    else:
        raise BackendError("SFX201", f"{op} inside a step that reads the parameters afterwards")


def fused_update_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a fused optimizer operation with the same kernel, on copies that are then written back."""
    name = op._schema.name.split("::")[1]
    functional = getattr(getattr(torch.ops.aten, name.rstrip("_")), op._overloadname)
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    for returned, values in zip(functional._schema.returns, functional(*args, **kwargs), strict=True):
        argument = str(returned.name).removesuffix("_out")
        if argument == "grads" and given.get("grad_scale") is None:
            continue  # the schema calls them written, but they are not
        for target, value in zip(given[argument], values, strict=True):
            target.copy_(value)
