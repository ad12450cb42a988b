"""Operators of wrapper subclasses: the interpreter runs ``__torch_dispatch__`` of their class."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.common.type_checks import safe_isinstance


class WrapperDispatch:
    """Runs operators of wrapper subclasses.

    Torch's dispatcher would call the Python of the class natively. The interpreter calls it instead, so that what it
    reads is guarded and what it changes is an effect; its operators on inner tensors are recorded.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self._methods: dict[int, tuple[Any, Any]] = {}

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operator, as torch's dispatcher finds it.

        Args:
            func: the operator.
            types: classes of its arguments, in the order in which they are asked.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            Unsupported: the operator cannot be captured.
        """
        asked = tuple(cls for cls in types if cls is not compat.FakeTensor)
        if safe_isinstance(func, compat.HigherOrderOperator) or self.world.branching:
            self._refuse(asked[0], func, "in torch.cond, or a higher-order operator")
        if self.world.tracer.proxy_mode.probes.among(args, kwargs):
            self._refuse(asked[0], func, "with a number that changes from call to call and that C++ code computes with")
        own = all(map(compat.is_jagged_class, asked))  # torch's Python, without effects that a backward could lose
        error = self.world.last_error
        with self.world.reads.unheard() if own else nullcontext():
            for cls in asked:
                answer = self._method(cls)(func, asked, args, kwargs)
                if answer is not NotImplemented:
                    # An exception handled in there holds frames, and these the result: autograd would copy a gradient
                    # that something else refers to.
                    self.world.last_error = error
                    return answer
        self._refuse(asked[0], func, "which it does not implement")

    def _method(self, cls: type) -> Any:
        """Returns ``__torch_dispatch__`` of a class as a function that the interpreter runs."""
        method = self.world.interp.getattr(cls, "__torch_dispatch__")
        function = getattr(method, "__func__", method)
        known = self._methods.get(id(cls))
        if known is None or known[0] is not function:
            known = self._methods[id(cls)] = function, self.world.interp.reentering(method)
        return known[1]

    def _refuse(self, cls: type, func: Any, why: str) -> NoReturn:
        self.world.heap.refuse("SFX109", f"calls {func} of a {cls.__qualname__}, a tensor subclass, {why}")
