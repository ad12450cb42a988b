"""When generated code fills new objects: one may refer to an object that can only be made with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ConstructionOrder:
    """Writes the contents of new objects as soon as nothing is being constructed that they may refer to."""

    _late: list[Callable[[], None]] | None = None
    """What is filled after the object that is being constructed; ``None`` if there is none."""

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Inside, the parts of an object are made that must exist before it, such as the items of a tuple.

        New objects among them are filled after it, since they may refer to it.
        """
        if self._late is not None:
            yield
            return
        self._late = []
        try:
            yield
        finally:
            late, self._late = self._late, None
        self._fill_all(late)

    @staticmethod
    def _fill_all(late: list[Callable[[], None]]) -> None:
        while late:
            late.pop(0)()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, new objects are filled immediately, and those before now: generated code reads or hashes them.

        Raises:
            Unsupported: one refers to an object that is being constructed.
        """
        late, self._late = self._late, None
        self._fill_all(late or [])
        try:
            yield
        finally:
            self._late = late

    def fill(self, fill: Callable[[], None]) -> None:
        """Writes the contents of a new object, now or after the object that it is a part of."""
        if self._late is None:
            fill()
        else:
            self._late.append(fill)
