"""Tensor subclasses without a ``__torch_dispatch__``: plain tensors that the program sees as instances of their class.

Their shadows are fake tensors. The program's class of a fake tensor that the step makes is kept here, with the
attributes of the instance. While a step with such tensors is captured or replayed, torch does not call their
``__torch_function__``; the interpreter calls it where the program's own calls would.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.records import Attributes
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import slot_names
from sidefx_train.compile.common.type_checks import shows_another

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


_READ = (
    "dtype", "device", "layout", "shape", "size", "stride", "storage_offset", "dim", "numel", "itemsize",
    "requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "data", "untyped_storage", "detach", "clone",
    "copy_", "view", "as_strided", "requires_grad_", "is_complex", "is_conj", "is_neg", "is_inference",
    "_base", "_is_view", "_version", "__class__", "__getattribute__",
)  # fmt: skip
"""Attributes that the capture, guards and the graph read of real tensors: those of libraries answer as torch does."""


def _redefines(cls: type, name: str) -> bool:
    return inspect.getattr_static(cls, name) is not inspect.getattr_static(torch.Tensor, name)


@dataclass
class Shown:
    """A tensor that the step made as an instance of a subclass.

    Attributes:
        tensor: the fake tensor.
        cls: its class for the program.
        attributes: holds its ``__dict__``.
    """

    tensor: torch.Tensor
    cls: type
    attributes: Attributes = field(default_factory=Attributes)


class ShownClasses:
    """The tensors of subclasses in one capture.

    Attributes:
        any: there is one; then torch calls no ``__torch_function__`` for the capture's own code.
    """

    def __init__(self, heap: ShadowTableAPI) -> None:
        self._heap = heap
        self._made: dict[int, Shown] = {}
        self.any = False

    def admit(self, cls: type, what: str) -> None:
        """Lets a capture have tensors of a subclass.

        Args:
            cls: the subclass.
            what: describes the tensor, for errors.

        Raises:
            Unsupported: tensors of that class are not captured.
        """
        if shows_another(cls) or slot_names(cls) or not compat.can_have_class(cls):
            self._heap.refuse("SFX109", f"{what}, a tensor subclass with slots or another __dict__")
        if cls.__module__.partition(".")[0] == "torch":
            self._heap.refuse("SFX109", f"{what}, a tensor subclass")
        own = next((name for name in _READ if _redefines(cls, name)), None)
        if own is not None and not is_library(cls.__module__):
            self._heap.refuse("SFX109", f"{what}, a tensor subclass with its own {own}")
        self.begin(what)

    def begin(self, what: str) -> None:
        """Makes torch call no ``__torch_function__`` for the capture's own code.

        Args:
            what: describes the tensor that has one, for errors.
        """
        if not self.any:
            if not compat.subclasses_enabled():
                self._heap.refuse("SFX109", f"{what}, a tensor subclass, while __torch_function__ is disabled")
            self.any = True
            compat.set_subclasses(False)

    def show(self, tensor: torch.Tensor, cls: type) -> torch.Tensor:
        """Makes a new fake tensor an instance of a subclass for the program."""
        self._made[id(tensor)] = Shown(tensor, cls)
        return tensor

    def of(self, tensor: Any) -> Shown | None:
        """Returns what is known of a fake tensor that the step made as an instance of a subclass."""
        return self._made.get(id(tensor))
