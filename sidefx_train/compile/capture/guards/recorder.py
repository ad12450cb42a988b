"""Collects the guards of one capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from sidefx_train.compile.capture.guards.guard import Guard, GuardKind
from sidefx_train.compile.capture.guards.source import Source, SourceTable
from sidefx_train.errors import Location, Unsupported


class GuardRecorder:
    """Guards and sources of one capture; also stops it.

    Args:
        locate: returns the user's line that is being interpreted.

    Attributes:
        sources: where values are found.
        guards: by kind, source and value.
    """

    def __init__(self, locate: Callable[[], Location | None]) -> None:
        self.locate = locate
        self.sources = SourceTable()
        self.guards: dict[tuple[Any, ...], Guard] = {}

    def guard(self, kind: GuardKind, source: Source, value: Any) -> None:
        """Adds a condition on the state at entry, once."""
        if source.kind == "const" and kind == "is":
            return
        key = (kind, id(source), value if type(value) is str else id(value))
        if key not in self.guards:
            self.guards[key] = Guard(kind, source, value, self.locate())

    def refuse(self, code: str, reason: str) -> NoReturn:
        """Stops the capture.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(code, reason, self.locate())

    def forget(self) -> None:
        """Drops the references to objects of guards and sources."""
        self.guards.clear()
        self.sources = SourceTable()
