"""Shadows of outside exceptions: those that a part continues to handle, and the one handled around the step."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static
from sidefx_train.compile.capture.shadows.records import InstanceRecord
from sidefx_train.compile.common.type_checks import set_field

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

CHAIN = ("__cause__", "__context__")


class ExceptionRecord(InstanceRecord):
    """An exception that existed before the capture; attributes like those of any instance."""

    begun: tuple[Any, ...] = ()

    def state(self) -> tuple[Any, ...]:
        """Returns everything that raising it, or raising another exception from it, changes."""
        error = self.shadow
        return error.args, error.__cause__, error.__context__, error.__suppress_context__, error.__traceback__

    def raised_again(self) -> bool:
        """Returns True if the step has changed it other than by attributes."""
        return any(now is not then for now, then in zip(self.state(), self.begun, strict=True))


def fields_of(cls: type) -> list[str]:
    """Returns the fields of C exception classes outside ``args``, such as ``StopIteration.value``."""
    if issubclass(cls, BaseExceptionGroup):
        return []
    kinds = [base for base in cls.__mro__ if is_static(base) and base is not BaseException]
    return [k for base in kinds for k, v in vars(base).items() if type(v) is types.MemberDescriptorType]


def exception_record(heap: ShadowTableAPI, real: BaseException, source: Source, base: Source) -> ExceptionRecord:
    """Returns the record of an exception, with guards on how it was raised; its traceback is the real one."""
    cls = type(real)
    sources = heap.sources
    args = heap.shadow(real.args, sources.slot(base, "args"))
    maker = next(kind for kind in cls.__mro__ if is_static(kind))
    shadow = _group(heap, real, base) if issubclass(cls, BaseExceptionGroup) else maker.__new__(cls, *args)
    set_field(shadow, "args", args)
    record = ExceptionRecord(heap, real, shadow, source, base)
    heap.by_real[id(real)] = heap.by_shadow[id(shadow)] = record  # contexts may refer back to it
    for name in (*CHAIN, *fields_of(cls)):
        value = getattr(real, name)
        if value is None:
            heap.guard("is", sources.slot(base, name), None)
        else:
            set_field(shadow, name, heap.shadow(value, sources.slot(base, name)))
    heap.guard("equal", sources.slot(base, "__suppress_context__"), real.__suppress_context__)
    set_field(shadow, "__suppress_context__", real.__suppress_context__)
    set_field(shadow, "__traceback__", real.__traceback__)
    record.begun = record.state()
    return record


def _group(heap: ShadowTableAPI, real: Any, base: Source) -> BaseException:
    """Returns an exception group of the shadows of a group's exceptions."""
    sources = heap.sources
    inside = heap.shadow(real.exceptions, sources.slot(base, "exceptions"))
    heap.shadow(real.message, sources.slot(base, "message"))
    return BaseExceptionGroup.__new__(type(real), real.message, inside)
