"""Records what Python code in a backward reads: it may have changed when the engine runs that backward outside."""

from __future__ import annotations

import os
import types
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import DEFINITIONS, base_container
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


class Reads:
    """Reads of variables, attributes and containers that a program could change, recorded while enabled.

    The recomputation of a checkpointed region is not recorded: it must repeat what the region did. Nor are the
    attributes of wrapper subclasses, which a backward reads like saved tensors, and the registry of ``pytree``.

    Attributes:
        listening: recording is enabled.
    """

    def __init__(self, world: CaptureContext) -> None:
        self.world = world
        self.listening = False
        self._found: list[tuple[Any, str]] = []

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Context that records reads."""
        self.listening = True
        try:
            yield
        finally:
            self.listening = False

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Context of Python code of torch that reads nothing that a program changes."""
        before, self.listening = self.listening, False
        try:
            yield
        finally:
            self.listening = before

    def attribute(self, obj: Any, name: str, value: Any) -> None:
        """Records a lookup of ``obj.name`` in the object itself, which may not have it."""
        if issubclass(type(obj), type):
            self.class_attribute(obj, name, value)
        elif issubclass(type(obj), types.ModuleType):
            self.variable(obj, name, value)
        elif name not in _STRUCTURE and not _is_of_class(type(obj), name) and not compat.is_wrapper(obj):
            self._note(obj, f".{name}", value)

    def variable(self, holder: Any, name: str, value: Any) -> None:
        """Records a read of a cell, or of a variable of a module or its namespace."""
        space = vars(holder) if safe_isinstance(holder, types.ModuleType) else holder
        trusted = type(space) is dict and self.world.heap.trusts(space)
        if not trusted and not safe_isinstance(value, (torch.Tensor, torch.nn.Module)):
            self._note(space, name, value)

    def class_attribute(self, cls: type, name: str, value: Any) -> None:
        """Records a read of a class attribute that is neither a method nor a property."""
        if value is not ABSENT and not is_library(cls.__module__) and not hasattr(type(value), "__get__"):
            self._note(cls, f".{name}", value)

    def containers(self, values: Iterable[Any]) -> None:
        """Records that C code reads the containers among the values."""
        for value in values:
            if base_container(type(value)) is not None:
                record = self.world.heap.record_of(value)
                if record is None or record.source.key not in _STRUCTURE:
                    self._note(value, "", None)

    def names_of(self, obj: Any) -> set[str]:
        """Returns the recorded attributes of an object."""
        return {name[1:] for holder, name in self._found if holder is obj}

    def changeable(self, leaving: Container[int]) -> str:
        """Describes one recorded value that the program may change before an outside backward; ``""`` if there is none.

        Args:
            leaving: ids of the objects created in the step that leave it.
        """
        heap = self.world.heap
        for holder, name in self._found:
            if safe_isinstance(holder, types.CellType):
                if id(holder) in heap.cells:
                    return name
            elif issubclass(type(holder), type):
                return f"{holder.__qualname__}{name}"
            elif id(holder) in heap.namespaces:
                return f"{holder.get('__name__')}.{name}"
            elif (record := heap.record_of(holder)) is not None:
                return f"{record.source.label}{name}"
            if id(holder) in leaving:
                return f"{name or 'the contents'} of a {type(holder).__qualname__} made in the step".lstrip(".")
        return ""

    def _note(self, holder: Any, name: str, value: Any) -> None:
        frame = self.world.interp.current_frame
        if frame is not None and frame.code.co_filename == _PYTREE:
            return
        if not safe_isinstance(value, DEFINITIONS) and not self._recomputes():
            self._found.append((holder, name))

    def _recomputes(self) -> bool:
        frame = self.world.interp.current_frame
        while frame is not None:
            if frame.code.co_filename == _CHECKPOINT:
                return True
            frame = frame.back
        return False


def _is_of_class(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__)


_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules", "__class__", "__dict__"})
_PYTREE = os.path.join(os.path.dirname(torch.__file__), "utils", "_pytree.py")
_CHECKPOINT = os.path.join(os.path.dirname(torch.__file__), "utils", "checkpoint.py")
