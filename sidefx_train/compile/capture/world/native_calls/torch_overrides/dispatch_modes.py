"""Dispatch modes that a step enters: the interpreter runs their ``__torch_dispatch__``.

Only those of selective activation checkpointing are captured. Such a mode sees the operators of the program, while
torch's dispatcher would show it also those of the capture itself, natively.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI


class DispatchModes:
    """The modes that the step has entered and not left.

    Attributes:
        entered: (mode of the program, native mode that stands for it), the innermost last.
        in_program: the running native code is the program's.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.entered: list[tuple[Any, Any]] = []
        self.in_program = False

    def enter(self, mode: Any) -> None:
        """Enters a mode of the program."""
        native = compat.ForwardingMode(lambda *call: self._run(mode, *call))
        native.__enter__()
        self.entered.append((mode, native))

    def leave(self, mode: Any) -> None:
        """Leaves a mode of the program, the innermost."""
        assert self.entered and self.entered[-1][0] is mode, "modes are left in reverse order"
        self.entered.pop()[1].__exit__(None, None, None)

    def close(self) -> None:
        """Leaves all modes that a stopped capture has not left."""
        while self.entered:
            self.leave(self.entered[-1][0])

    def _run(self, mode: Any, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operator under a mode."""
        if not self.in_program or func is compat.DEVICE_OF:  # C++ asks fakes, not tensors, for their device by it
            return func(*args, **kwargs)
        method = self.world.interp.reentering(self.world.interp.getattr(mode, "__torch_dispatch__"))
        shown = tuple(cls for cls in types if cls is not compat.FakeTensor)
        error = self.world.last_error
        made = method(func, shown, args, kwargs)
        self.world.last_error = error  # it holds frames, and these the result, which autograd would then copy
        return made

    @contextmanager
    def running(self, program: bool) -> Iterator[None]:
        """Context of native code of the program, or of the capture."""
        before, self.in_program = self.in_program, program
        try:
            yield
        finally:
            self.in_program = before
