"""Shadows of lists and dicts: what the step reads and changes in them."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Pick, Source
from sidefx_train.compile.capture.guards.symbol_guards import CONDITION_NAMES
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record
from sidefx_train.compile.common.plain_values import base_of, is_plain, stored_entries
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


_MOST_ITEMS = 64
"""Limit of items of a part of a list that are guarded one by one."""


_MOST_SHORTER = 10
"""Limit of items of such a part for a list that has fewer: each length is captured."""


_PICKED = (list, dict, tuple, float, torch.Tensor)
"""Classes of items that another call may find replaced; they are guarded as far as they are read."""


class ListRecord(Record):
    """A list or deque. Until something reads it, the shadow contains only what the step appended.

    Attributes:
        filled: all items were read.
        snapshot: the items as they were read.
        placed: items that the step has written to an unread list at indices that change, in order.
    """

    NOTES = ("filled", "snapshot", "placed")

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, base: Source) -> None:
        super().__init__(heap, real, shadow, source, base)
        self.filled = False
        self.snapshot: list[Any] = []
        self.placed: list[tuple[Any, Any]] = []
        self._picked: dict[str, Source] = {}

    def fill(self) -> None:
        if self.filled:
            return
        if self.base.label in self.heap.specialization.unbounded_lists:
            self.heap.refuse("SFX114", f"reads all items of {self.base.label}, which gets longer at every call")
        self.filled = True
        base = list if safe_isinstance(self.shadow, list) else deque
        self.heap.guard("length", self.base, base.__len__(self.real))
        if self.base.label in self.heap.specialization.changed_lengths:
            self.heap.decides()
        tail = list(base.__iter__(self.shadow))
        base.clear(self.shadow)
        for index, item in enumerate(list(base.__iter__(self.real))):
            base.append(self.shadow, self.heap.shadow(item, self.heap.sources.item(self.base, index)))
        self.snapshot = list(base.__iter__(self.shadow))
        for place, item in self.placed:
            self.shadow[int(place)] = item
        base.extend(self.shadow, tail)

    def reset(self) -> None:
        self.placed = []
        base = list if safe_isinstance(self.shadow, list) else deque
        base.clear(self.shadow)
        base.extend(self.shadow, self.snapshot)

    def at(self, index: int) -> Any:
        """Returns the item at an index without reading the others; :data:`ABSENT` if that is not possible, or if the
        index counts from the start of a list that does not grow."""
        if self.filled or self.placed or not self.plain or type(self.real) not in (list, deque):
            return ABSENT
        bound = self.real.maxlen if type(self.real) is deque else None
        if index >= 0:
            if not self.grows or index >= len(self.real) or (bound is not None and self.shadow):
                return ABSENT
            return self.heap.shadow(self.real[index], self.heap.sources.item(self.base, index))
        if -index <= len(self.shadow):
            return self.shadow[index]
        if bound is not None and -index > bound:
            return ABSENT
        outside = index + len(self.shadow)
        if -outside > len(self.real):
            return ABSENT
        return self.heap.shadow(self.real[outside], self.heap.sources.item(self.base, outside))

    def at_changing(self, index: torch.SymInt) -> Any:
        """Returns the item at an index that the step computes from changing numbers, without reading the others;
        :data:`ABSENT` if that is not possible.

        Another call may find another item there, which is guarded as far as it is read: a container, a float or a
        tensor, not an object that the step is captured for.
        """
        if self.filled or not self.plain or type(self.real) not in (list, deque):
            return ABSENT
        if self.placed:
            index = index + self.length() if index < 0 else index
            for place, item in reversed(self.placed):
                if index == place:
                    return item
        if self.shadow:  # the step appended items, and a full deque has dropped others for them
            before = self.heap.length(len(self.real), self._length_source)
            appended = len(self.shadow)
            if type(self.real) is deque and self.real.maxlen is not None:
                index = index + torch.sym_max(before + appended - self.real.maxlen, 0)
            if not 0 <= index < before:
                return self.shadow[int(index - before)] if index >= before else ABSENT
        found, picked = self._pick(index)
        if type(found) not in _PICKED or picked is None:
            return ABSENT
        return self.heap.shadow(found, picked)

    def place_at(self, index: torch.SymInt, item: Any) -> bool:
        """Writes an item at an index that the step computes from changing numbers, without reading the others; returns
        False if that is not possible."""
        if self.filled or self.shadow or not self.plain or type(self.real) is not list:
            return False
        found, picked = self._pick(index)
        if picked is None or not (type(found) in _PICKED or is_plain(found)) or not 0 <= index < self.length():
            return False
        self.placed.append((index, item))
        return True

    def _pick(self, index: torch.SymInt) -> tuple[Any, Source | None]:
        """Returns the item at an index that the prologue can compute, and where it is found at each call."""
        known = {compat.symbol_name(number): (source, real) for number, source, real in self.heap.numbers}
        names = compat.symbol_names(index)
        if not names or not all(name in known and type(known[name][1]) is int for name in names):
            return None, None
        if not compat.has_integers_only(index):  # sympy computes with floats less exactly
            return None, None
        code = compat.python_source(index.node.expr)
        pick = Pick(code, {name: known[name][0] for name in names}, CONDITION_NAMES)
        found = pick(self.real, *(known[name][1] for name in names))
        return found, self._picked.setdefault(pick.label, self.heap.sources.picked(self.base, pick))

    def length(self) -> Any:
        """Returns the length, symbolic for one that changes; ``None`` if all items must be read for it."""
        if self.filled or not self.plain or type(self.real) not in (list, deque):
            return None
        source = self._length_source
        if self.shadow or source.label in self.heap.specialization.symbolic_numbers:
            length = self.heap.length(len(self.real), source) + len(self.shadow)
            bound = self.real.maxlen if type(self.real) is deque else None
            return length if bound is None else torch.sym_min(length, bound)
        self.heap.guard("length", self.base, len(self.real))
        return len(self.real)

    def part(self, bounds: slice) -> Any:
        """Returns the first or last items of a list that grows (``history[-10:]``) without reading the others;
        :data:`ABSENT` if that is not possible, or if there are fewer."""
        start, stop, step = bounds.start, bounds.stop, bounds.step
        if not self.grows or self.placed or not self.plain or type(self.real) is not list or step not in (None, 1):
            return ABSENT
        if type(start) is int and start < 0 and stop is None:
            places = range(start, 0)
        elif start in (None, 0) and type(stop) is int and stop > 0:
            places = range(stop)
        else:
            return ABSENT
        if len(places) > _MOST_ITEMS:
            return ABSENT
        length = self.length()
        if not length >= len(places):  # one capture for each length until then
            if len(places) > _MOST_SHORTER:
                return ABSENT
            count = int(length)
            places = range(-count, 0) if start not in (None, 0) else range(count)
        return [self.at(place) for place in places]

    @property
    def holds_changing_numbers(self) -> bool:
        """Returns True for an unread list or deque of numbers of which some, or how many they are, have changed."""
        if self.filled or self.placed or not self.plain or type(self.real) not in (list, deque):
            return False
        label, spec = self.base.label, self.heap.specialization
        changed = label in spec.unbounded_lists or label in spec.changed_lengths
        changed = changed or self._length_source.label in spec.symbolic_numbers
        changed = changed or any(each.startswith(f"{label}[") for each in spec.symbolic_numbers)
        return changed and {*map(type, self.real)} <= {int, float}

    @property
    def _length_source(self) -> Source:
        return self.heap.sources.call(self.heap.sources.slot(self.base, "__len__"))

    @property
    def grows(self) -> bool:
        """Returns True for an unread list that the step has appended to, or that became longer at every call."""
        return not self.filled and bool(self.shadow or self.base.label in self.heap.specialization.unbounded_lists)

    @property
    def appended(self) -> list[Any]:
        """Returns the items appended to an unread list."""
        return [] if self.filled else list(self.shadow)


class DictRecord(Record):
    """A dict, OrderedDict or defaultdict; entries with plain keys are read one by one until all are needed."""

    NOTES = ("filled", "snapshot", "missing")

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, base: Source) -> None:
        super().__init__(heap, real, shadow, source, base)
        self.filled = False
        self.snapshot: dict[Any, Any] = {}
        self.missing: set[Any] = set()

    def own_attributes(self) -> InstanceRecord:
        """Returns the record of the attributes of an ``OrderedDict``, such as the ``_metadata`` of a state dict."""
        if self.instance is None:
            self.instance = InstanceRecord(self.heap, self.real, self.shadow, self.base, self.base)
        return self.instance

    def bring(self, key: Any) -> bool:
        """Reads the entry of ``key``; returns True if the shadow has the key afterwards."""
        self._pin_written()
        if dict.__contains__(self.shadow, key):
            return True
        if self.filled or key in self.missing or key in self.snapshot:
            return False
        real_key = self.heap.real_key(key)
        if real_key is ABSENT:
            return False
        if not dict.__contains__(self.real, real_key):
            self.missing.add(key)
            self.heap.guard("no_item", self.base, real_key)
            return False
        self._take(key, real_key)
        return True

    def _pin_written(self) -> None:
        """Guards the keys that the step wrote unread before they are compared with the keys that it reads."""
        if not self.filled and dict.__len__(self.shadow) > len(self.snapshot):
            for key in base_of(self.shadow).__iter__(self.shadow):
                if key not in self.snapshot:
                    self.heap.identities.pin_key(key)

    def _take(self, key: Any, real_key: Any) -> None:
        value = dict.__getitem__(self.real, real_key)
        hint = key if safe_isinstance(key, str) else ""
        value = self.heap.shadow(value, self.heap.sources.item(self.base, real_key), hint)
        base_of(self.shadow).__setitem__(self.shadow, key, value)
        self.snapshot[key] = value

    def fill(self) -> None:
        if self.filled:
            return
        self._pin_written()
        keys = tuple(base_of(self.real).__iter__(self.real))
        if not keys:
            self.heap.guard("length", self.base, 0)
        else:
            self.heap.guard("keys", self.base, keys)
        changed = stored_entries(self.shadow)
        base_of(self.shadow).clear(self.shadow)
        gone = {key for key in self.snapshot if key not in changed}
        order: list[Any] = []
        for position, real_key in enumerate(keys):
            key = self.heap.shadow_key(real_key, self.base, position)
            order.append(key)
            if key in gone:
                continue
            if key in changed:
                base_of(self.shadow).__setitem__(self.shadow, key, changed.pop(key))
                if key not in self.snapshot:  # written before it was read
                    self.snapshot[key] = ABSENT
            else:
                self._take(key, real_key)
        for key, value in changed.items():
            base_of(self.shadow).__setitem__(self.shadow, key, value)
        self.snapshot = {key: self.snapshot[key] for key in order if key in self.snapshot}  # not in reading order
        self.filled = True

    def reset(self) -> None:
        self.snapshot = {key: value for key, value in self.snapshot.items() if value is not ABSENT}
        base = base_of(self.shadow)
        base.clear(self.shadow)
        for key, value in self.snapshot.items():
            base.__setitem__(self.shadow, key, value)
        self.filled = False

    def length(self) -> int | None:
        """Returns the length without reading the contents, if nothing was written yet."""
        if self.filled or any(key not in self.snapshot for key in base_of(self.shadow).__iter__(self.shadow)):
            return None
        if len(self.snapshot) != dict.__len__(self.shadow):
            return None
        held = (item for entry in dict.items(self.real) for item in entry)
        if any(safe_isinstance(item, weakref.ref) for item in held):  # entries vanish with their referents
            return None
        self.heap.guard("length", self.base, dict.__len__(self.real))
        return dict.__len__(self.real)

    def same_entries(self) -> bool:
        """Returns True if the step changed nothing."""
        now = stored_entries(self.shadow)
        return len(now) == len(self.snapshot) and all(
            key in self.snapshot and self.snapshot[key] is value for key, value in now.items()
        )
