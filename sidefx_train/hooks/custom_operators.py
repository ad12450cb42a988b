"""Operators whose derivative is registered in Python (``torch.library.register_autograd``).

Torch's dispatcher calls the autograd kernel, a ``torch.autograd.Function`` that torch generates; its Python would
bypass the interpreter. A capture applies an equivalent function whose ``setup_context`` and ``backward`` are
interpreted. Other Python kernels that the dispatcher calls before it records are not known to Python: the call breaks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(*compat.OPERATORS)
def _call(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operator, *given = args
    natively = compat.kernel_before_recording(operator, compat.inside_transform())
    if natively:
        world.heap.refuse("SFX111", f"calls {operator}; {natively} is Python that the dispatcher calls")
    generated = compat.python_derivative(operator)
    if generated is None or not torch.is_grad_enabled():
        return ABSENT
    if not any(
        safe_isinstance(value, torch.Tensor) and value.requires_grad for value in _leaves((*given, *kwargs.values()))
    ):
        return ABSENT
    overload, registration = generated
    if overload is None or registration is None:
        world.heap.refuse("SFX111", f"calls {operator}, an operator over lists of tensors with a derivative in Python")
    positional, named = compat.operator_arguments(overload, tuple(given), kwargs)
    reentering_class = _reentering_class(world, overload, registration, named)
    return world.interp.call(compat.bound_apply(reentering_class), tuple(positional), {})


def _leaves(values: tuple[Any, ...]) -> list[Any]:
    return [leaf for value in values for leaf in (value if type(value) in (list, tuple) else (value,))]


def _reentering_class(world: TraceWorld, overload: Any, registration: Any, named: dict[str, Any]) -> type:
    heap, alive = world.heap, weakref.ref(world)  # the node holds the class, and the world holds tensors with the node
    held = heap.shadow(registration, heap.sources.const(registration, f"the derivative of {overload}"))

    def python(name: str) -> Any:
        fn = world.interp.getattr(held, name)
        return None if fn is None else world.interp.reentering(fn)

    set_up, differentiate = python("_setup_context_fn"), python("_backward_fn")

    def forward(ctx: Any, *args: Any) -> Any:
        capturing = alive()
        assert capturing is not None, f"{overload} is called after its capture"
        with compat.below_autograd_only():
            result = capturing.native_call(overload, args, named)
            if set_up is not None:
                inputs, keywords = compat.operator_defaults(overload, args, named)
                more = {"keyword_only_inputs": keywords} if compat.has_keyword_arguments(overload) else {}
                set_up(ctx=ctx, inputs=inputs, output=result, **more)
        return result

    def backward(ctx: Any, *grads: Any) -> Any:
        if differentiate is None:
            reason = f"Trying to backward through {overload} but no autograd formula was registered. "
            raise RuntimeError(reason + "Please use register_autograd to add one.")
        return differentiate(ctx, *grads)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    reentering_class = type(compat.name_of_derivative(overload), (torch.autograd.Function,), methods)
    world.reentering_classes[reentering_class] = reentering_class
    return reentering_class
