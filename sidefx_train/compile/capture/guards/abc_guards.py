"""Guards on subclass answers of abstract base classes: ``register`` changes them without changing either class."""

from __future__ import annotations

import _abc
import abc
from collections.abc import Iterable


class Registered:
    """Subclass answers of abstract base classes; checked again only after some class was registered anywhere.

    Attributes:
        answers: (abstract class, class) -> whether the second is a subclass of the first.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[type, type], bool] = {}
        self._token = abc.get_cache_token()

    def ask(self, owners: Iterable[type], cls: type) -> None:
        """Records what abstract base classes answer for a class."""
        for owner in owners:
            self.answers[owner, cls] = _abc._abc_subclasscheck(owner, cls)

    def holds(self) -> bool:
        """Returns True if all answers are unchanged."""
        token = abc.get_cache_token()
        if token != self._token:
            if any(_abc._abc_subclasscheck(*pair) is not answer for pair, answer in self.answers.items()):
                return False
            self._token = token
        return True
