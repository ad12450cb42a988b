"""Shadows of views of dicts and of mapping proxies: views and proxies of the shadows of their dicts."""

from __future__ import annotations

import gc
import types
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.guards.source import Pick, Source
from sidefx_train.compile.capture.shadows import transient_objects
from sidefx_train.compile.capture.shadows.containers.instance_dicts import InstanceDictRecord
from sidefx_train.compile.capture.shadows.containers.traversal import DICT_VIEWS
from sidefx_train.compile.capture.shadows.factories import instance_shadow
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class _Viewed(Pick):
    """Finds the dict that a view shows.

    Args:
        kind: the class of the view.
    """

    __slots__ = ("_kind",)

    def __init__(self, kind: type) -> None:
        self.operands, self.label, self._kind = (), "its dict", kind

    def __call__(self, items: Any, *numbers: Any) -> Any:
        """Returns the dict, or a value that no guard accepts."""
        return _dict_of(items) if type(items) is self._kind else None


def _dict_of(view: Any) -> Any:
    """Returns the dict that a view shows; ``None`` for a mapping of another kind, or the namespace of a class."""
    (mapping,) = gc.get_referents(view)
    is_dict = type(mapping) is OrderedDict if type(view) in _ORDERED else safe_isinstance(mapping, dict)
    return mapping if is_dict and not ("__module__" in mapping and type(view) is types.MappingProxyType) else None


_ORDERED = frozenset(kind for kind, view in DICT_VIEWS.items() if view.__objclass__ is OrderedDict)  # type: ignore[attr-defined]


def view_shadow(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Returns a view of the shadow of a view's dict, or a proxy of it.

    A view is a transient object: one in the arguments is guarded by what it shows.
    """
    cls, mapping = type(real), _dict_of(real)
    if mapping is None:
        what = f"{source.label} is a view of a mapping that is not a dict, or of a class namespace"
        heap.refuse("SFX104", what)
    if type(heap.by_real.get(id(mapping))) is InstanceDictRecord:  # it may hold the view, which it would read
        return instance_shadow(heap, real, source)
    if source.from_arguments or transient_objects.is_transient(heap, real, source):
        heap.guard("type", source, cls)
        base, held = source, heap.sources.picked(source, _Viewed(cls))
    else:
        heap.guard("is", source, real)
        base = heap.sources.const(real, source.label)
        held = heap.sources.const(mapping, f"the dict of {base.label}")
    make: Any = DICT_VIEWS.get(cls, types.MappingProxyType)
    shown = heap.shadow(mapping, held)
    if id(real) in heap.by_real:  # the dict holds the view
        return heap.by_real[id(real)].shadow
    shadow = heap.register(Record(heap, real, make(shown), base, base))
    heap.by_real[id(mapping)].fill()
    return shadow
