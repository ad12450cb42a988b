"""Guards on tensors: metadata, and which of them share storage or a version counter."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard, TensorFacts, shown
from sidefx_train.compile.capture.guards.kinds.base import Arguments, Kind, register
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.source_writer import Writer


@register("tensor")
class Tensor(Kind):
    """A tensor with this metadata: a :class:`TensorFacts`."""

    phase = "tensor"
    native = True

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} is a {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        raise AssertionError("all tensors are tested in one call")

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        if not isinstance(value, torch.Tensor):
            return True, type(value)
        facts = TensorFacts.of(value)
        return not guard.value.fits(facts), facts


@register("tensor_or_none")
class TensorOrNone(Kind):
    """Any tensor, or ``None``: the step passes it on."""

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} is a tensor or None"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        value, tensor = writer.value(guard.source), writer.constant(torch.Tensor)
        return f"{value} is not None and not {writer.constant(issubclass)}({writer.constant(type)}({value}), {tensor})"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return value is not None and not issubclass(type(value), torch.Tensor), type(value)


@register("no_shared_storage")
class NoSharedStorage(Kind):
    """Two tensors do not share storage."""

    phase = "relation"

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} shares no storage with {guard.value.label}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        storage = writer.constant(compat.storage_address, "storage_address")
        return f"{storage}({writer.value(guard.source)}) == {storage}({writer.value(guard.value)})"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return compat.storage_address(value) == compat.storage_address(guard.value.fetch(*arguments)), value

    def others(self, guard: Guard) -> tuple[Source, ...]:
        return (guard.value,)


@register("no_overlap")
class NoOverlap(Kind):
    """The storage of a tensor is none of these, of tensors that the entry holds."""

    phase = "relation"

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} shares no storage with {len(guard.value)} tensors that the step holds"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        storage = writer.constant(compat.storage_address, "storage_address")
        return f"{storage}({writer.value(guard.source)}) in {writer.constant(guard.value, 'held_storages')}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return compat.storage_address(value) in guard.value, "memory of a tensor that the step holds"


@register("same_storage_offset")
class SameStorageOffset(Kind):
    """Two tensors of one storage lie this many bytes apart."""

    phase = "relation"

    def describe(self, guard: Guard) -> str:
        return f"{guard.value[0].label} begins {guard.value[1]} bytes after {guard.source.label}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        other, distance = guard.value
        return f"{writer.value(other)}.data_ptr() - {writer.value(guard.source)}.data_ptr() != {distance}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        other, distance = guard.value
        found = other.fetch(*arguments).data_ptr() - value.data_ptr()
        return found != distance, f"{found} bytes"

    def others(self, guard: Guard) -> tuple[Source, ...]:
        return (guard.value[0],)


@register("version_counter")
class VersionCounter(Kind):
    """Two tensors of one storage share their version counter, or do not."""

    phase = "relation"

    def describe(self, guard: Guard) -> str:
        other, shared = guard.value
        return f"{guard.source.label} and {other.label} {'share' if shared else 'do not share'} a version counter"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        other, shared = guard.value
        share = writer.constant(compat.share_version_counter, "share_version_counter")
        asked = f"{share}({writer.value(guard.source)}, {writer.value(other)})"
        return f"not {asked}" if shared else asked

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        other, shared = guard.value
        found = compat.share_version_counter(value, other.fetch(*arguments))
        return found != shared, "shared" if found else "not shared"

    def others(self, guard: Guard) -> tuple[Source, ...]:
        return (guard.value[0],)


@register("storage_sharing")
class StorageSharing(Kind):
    """Tensors that the entry holds share storage as they did: a ``StorageSharing`` of ``guards/storage_guards.py``."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"{guard.value} share storage as before"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        return f"not {writer.constant(guard.value.refresh, 'share_memory_as_before')}()"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return not guard.value.holds(), "shared otherwise"
