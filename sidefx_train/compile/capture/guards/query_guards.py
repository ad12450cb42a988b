"""Guards on answers of C functions about global state: they are called again before every replay."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from sidefx_train.compile.capture.guards.guard import same_value
from sidefx_train.compile.common.plain_values import PLAIN_TYPES

_ABSENT = object()


class Asked:
    """A query whose answer is not one plain value, and that answer.

    Args:
        ask: returns the answer.
        answer: the answer at entry.
    """

    def __init__(self, ask: Callable[[], Any], answer: Any) -> None:
        self.ask = ask
        self.answer = _copied(answer)

    def holds(self) -> bool:
        """Returns True if the answer is the same."""
        return same_answer(self.ask(), self.answer)


class NotImportable:
    """A module that an ``import`` did not find.

    Args:
        name: its full name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocked = sys.modules.get(name, _ABSENT)

    def holds(self) -> bool:
        """Returns True if the import would still not find it."""
        if sys.modules.get(self.name, _ABSENT) is not self.blocked:
            return False
        try:
            return self.blocked is None or importlib.util.find_spec(self.name) is None
        except (ImportError, ValueError):  # its parent package does not exist
            return True


def same_answer(found: Any, answer: Any) -> bool:
    """Returns True if no program can distinguish two answers except by identity."""
    kind = type(answer)
    if type(found) is not kind:
        return False
    if kind in (list, tuple):
        return len(found) == len(answer) and all(map(same_answer, found, answer))
    if kind is dict:
        return list(found) == list(answer) and all(map(same_answer, found.values(), answer.values()))
    return same_value(found, answer) if kind in PLAIN_TYPES else found is answer or bool(found == answer)


def _copied(answer: Any) -> Any:
    """Returns a copy of an answer."""
    if type(answer) is dict:
        return {key: _copied(value) for key, value in answer.items()}
    return type(answer)(map(_copied, answer)) if type(answer) in (list, tuple) else answer
