"""Shadows of lists and dicts: what the step reads and changes in them."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Pick, Source
from sidefx_train.compile.capture.guards.symbol_guards import CONDITION_NAMES
from sidefx_train.compile.capture.interpreter.generator_finalizers import runs_code_when_freed
from sidefx_train.compile.capture.shadows.containers.appended_items import AppendedItems, PickAmongAppended
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record
from sidefx_train.compile.common.plain_values import base_of, stored_entries
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


_MOST_ITEMS = 64
"""Limit of items of a part of a list that are guarded one by one."""


_MOST_SHORTER = 10
"""Limit of items of such a part for a list that has fewer: each length is captured."""


_MOST_EDITS = 16
"""Limit of single items that a step writes and removes before it reads the whole list."""


_PICKED = (list, dict, float, bool, torch.Tensor)
"""Classes of items that another call may find replaced, besides tuples; they are guarded as far as they are read."""


class Edit(NamedTuple):
    """One change of an unread list.

    Attributes:
        place: where, counted from the start of the list as it was then, without what the step appended.
        item: what was written there; :data:`ABSENT` if the item was removed.
        outside: index of the item that was there in the outside list; ``None`` for one that the step wrote.
    """

    place: Any
    item: Any
    outside: Any


class ListRecord(Record):
    """A list or deque. Until something reads it, the shadow contains only what the step appended.

    Attributes:
        filled: all items were read.
        snapshot: the items as they were read.
        edits: what the step has written to an unread list at indices that change, and removed from it, in order.
    """

    NOTES = ("filled", "snapshot", "edits")

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, base: Source) -> None:
        super().__init__(heap, real, shadow, source, base)
        self.filled = False
        self.snapshot: list[Any] = []
        self.edits: list[Edit] = []
        self._picked: dict[tuple[Any, ...], tuple[AppendedItems | None, Source]] = {}

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
        for place, item, _ in self.edits:
            if item is ABSENT:
                del self.shadow[int(place)]
            else:
                self.shadow[int(place)] = item
        base.extend(self.shadow, tail)

    def reset(self) -> None:
        self.edits = []
        base = list if safe_isinstance(self.shadow, list) else deque
        base.clear(self.shadow)
        base.extend(self.shadow, self.snapshot)

    @property
    def is_changed(self) -> bool:
        """Returns True if the step has changed which items the list has."""
        if not self.filled:
            return bool(self.shadow or self.edits)
        now = self.shadow
        return len(now) != len(self.snapshot) or any(a is not b for a, b in zip(now, self.snapshot, strict=True))

    def at(self, index: int) -> Any:
        """Returns the item at an index without reading the others; :data:`ABSENT` if that is not possible, or if the
        index counts from the start of a list that does not grow."""
        if not self._is_unread:
            return ABSENT
        if self.edits:
            return self._after_edits(index)
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
        if not self._is_unread:
            return ABSENT
        if self.edits:
            return self._after_edits(index)
        if self.shadow:  # the step appended items, and a full deque has dropped others for them
            before = self.heap.numbers.length(len(self.real), self._length_source)
            after, dropped = before + len(self.shadow), 0
            if type(self.real) is deque and self.real.maxlen is not None:
                dropped = torch.sym_max(after - self.real.maxlen, 0)
            index = index + after if index < 0 else index + dropped
            appended = AppendedItems(self.heap, list(self.shadow))
            known = appended.makers is not None and self.heap.specialization.picks_appended
            if known and type(index) is torch.SymInt and dropped <= index < after:
                return self._outside(index, appended)
            if not dropped <= index < before:
                return self.shadow[int(index - before)] if index >= before else ABSENT
        return self._outside(index)

    def place_at(self, index: Any, item: Any) -> bool:
        """Writes an item at an index that the step computes from changing numbers, or at any index after such a write,
        without reading the others; returns False if that is not possible."""
        if (type(index) is int and not self.edits) or not self._takes_edits:
            return False
        place = self._place_of(index)
        if place is ABSENT:
            return False
        if self.shadow and not place < self._length_outside():
            self.shadow[int(place - self._length_outside())] = item
            return True
        return self._edit(place, item)

    def remove(self, index: Any) -> bool:
        """Removes the item at an index without reading the others; returns False if that is not possible."""
        if not self._takes_edits:
            return False
        if type(index) is int and 0 < -index <= len(self.shadow):
            del self.shadow[index]
            return True
        place = self._place_of(index, removes=True)
        if place is ABSENT:
            return False
        if self.shadow and not place < self._length_outside(removes=True):
            del self.shadow[int(place - self._length_outside())]
            return True
        return self._edit(place, ABSENT)

    def take(self, index: Any) -> Any:
        """Removes the item at an index and returns it, without reading the others; :data:`ABSENT` if that is not
        possible."""
        if not self._takes_edits:
            return ABSENT
        if self.edits or self.shadow or type(index) is not int:
            item = self._after_edits(index, removes=True)
        elif -len(self.real) <= index < len(self.real):
            item = self.heap.shadow(self.real[index], self.heap.sources.item(self.base, index))
        else:
            return ABSENT
        return item if item is not ABSENT and self.remove(index) else ABSENT

    def lost(self) -> Iterator[tuple[Any, Any]]:
        """Yields each item of the outside list that :attr:`edits` and full deques take from it, with what is in its
        place."""
        if type(self.real) is deque and self.real.maxlen is not None and self.shadow:
            dropped = len(self.real) + len(self.shadow) - self.real.maxlen
            yield from ((item, ABSENT) for item in itertools.islice(self.real, max(dropped, 0)))
        for _, item, outside in self.edits:
            if outside is not None:
                yield self.real[outside if type(outside) is int else compat.hint_of(outside)], item

    @property
    def _is_unread(self) -> bool:
        return not self.filled and self.plain and type(self.real) in (list, deque)

    @property
    def picks_any(self) -> bool:
        """Returns True if :meth:`at_changing` finds any item without a decision on which one it is."""
        if not self._is_unread or self.edits:
            return False
        return not self.shadow or (
            self.heap.specialization.picks_appended and AppendedItems(self.heap, list(self.shadow)).makers is not None
        )

    @property
    def _takes_edits(self) -> bool:
        """Returns True for an unread list of which single items may be written and removed."""
        bound = self.real.maxlen if type(self.real) is deque else None
        return self._is_unread and bound is None and len(self.edits) < _MOST_EDITS

    def _edit(self, place: Any, item: Any) -> bool:
        """Notes a change; returns False if nothing finds the lost item at each call, or if it runs code when freed."""
        held, outside = self._before_edits(place)
        if held is ABSENT:
            known = type(outside) is int
            lost, found = (
                (self.real[outside], self.heap.sources.item(self.base, outside)) if known else self._pick(outside)
            )
            if found is None or runs_code_when_freed(lost):
                return False
            self.heap.guard("runs_code_when_freed", found, False)
        self.edits.append(Edit(place, item, outside))
        return True

    def _place_of(self, index: Any, removes: bool = False) -> Any:
        """Returns an index counted from the start; :data:`ABSENT` for one that is out of range."""
        length = self._length_outside(removes) + len(self.shadow)
        index = index + length if index < 0 else index
        return index if 0 <= index < length else ABSENT

    def _after_edits(self, index: Any, removes: bool = False) -> Any:
        """Returns the item at an index of a list that the step has changed; :data:`ABSENT` as of :meth:`at`."""
        if type(index) is int and 0 < -index <= len(self.shadow):
            return self.shadow[index]
        place = self._place_of(index, removes)
        if place is ABSENT:
            return ABSENT
        before = self._length_outside(removes)
        if self.shadow and not place < before:
            return self.shadow[int(place - before)]
        item, outside = self._before_edits(place)
        return self._outside(outside) if item is ABSENT else item

    def _before_edits(self, place: Any) -> tuple[Any, Any]:
        """Returns what the step has written at a place, or :data:`ABSENT` and the index in the outside list."""
        for edit in reversed(self.edits):
            if edit.item is ABSENT:
                place = place + 1 if place >= edit.place else place
            elif place == edit.place:
                return edit.item, None
        return ABSENT, place

    def _outside(self, index: Any, appended: AppendedItems | None = None) -> Any:
        """Returns an item of the outside list, or one appended to it; :data:`ABSENT` if nothing finds it at each
        call."""
        if type(index) is int:
            return self.heap.shadow(self.real[index], self.heap.sources.item(self.base, index))
        found, picked = self._pick(index, appended)
        if picked is None or not (type(found) in _PICKED or safe_isinstance(found, tuple)):
            return ABSENT
        return self.heap.shadow(found, picked)

    def _pick(self, index: torch.SymInt, appended: AppendedItems | None = None) -> tuple[Any, Source | None]:
        """Returns the item at an index that the prologue can compute, and where it is found at each call."""
        known = {compat.symbol_name(number): (source, real) for number, source, real in self.heap.numbers.inputs}
        names = compat.symbol_names(index)
        if not names or not all(name in known and type(known[name][1]) is int for name in names):
            return None, None
        if not compat.has_integers_only(index):  # sympy computes with floats less exactly
            return None, None
        code = compat.python_source(index.node.expr)
        operands, values = {name: known[name][0] for name in names}, [known[name][1] for name in names]
        pick, key = Pick(code, operands, CONDITION_NAMES), tuple[Any, ...]((code,))
        if appended is not None:
            pick = PickAmongAppended(code, operands, CONDITION_NAMES, appended)
            key, values = (code, *map(id, appended.items)), [*values, *appended.values]
        _, source = self._picked.setdefault(key, (appended, self.heap.sources.picked(self.base, pick)))
        return pick(self.real, *values), source

    def _length_outside(self, removes: bool = False) -> Any:
        """Returns the length without what the step has appended: symbolic if that changes, or if the step removes or
        appends items."""
        source = self._length_source
        removed = sum(edit.item is ABSENT for edit in self.edits)
        if removes or removed or self.shadow or source.label in self.heap.specialization.symbolic_numbers:
            return self.heap.numbers.length(len(self.real), source) - removed
        self.heap.guard("length", self.base, len(self.real))
        return len(self.real)

    def length(self) -> Any:
        """Returns the length, symbolic for one that changes; ``None`` if all items must be read for it."""
        if not self._is_unread:
            return None
        length = self._length_outside() + len(self.shadow)
        bound = self.real.maxlen if type(self.real) is deque else None
        return torch.sym_min(length, bound) if bound is not None and type(length) is torch.SymInt else length

    def part(self, bounds: slice) -> Any:
        """Returns the first or last items of a list that grows (``history[-10:]``) without reading the others;
        :data:`ABSENT` if that is not possible, or if there are fewer."""
        start, stop, step = bounds.start, bounds.stop, bounds.step
        if not self.grows or self.edits or not self.plain or type(self.real) is not list or step not in (None, 1):
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
        """Returns True for an unread list or deque of numbers of which some, or how many they are, have changed; the
        step has written none of them, and removed none at a place that changes."""
        if not self._is_unread or not all(edit.item is ABSENT and type(edit.place) is int for edit in self.edits):
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
