"""What abstract base classes said of classes: ``register`` changes that and leaves both classes as they are."""

from __future__ import annotations

import _abc
import abc
from collections.abc import Iterable


class Registered:
    """Answers of abstract base classes, asked again only after something was registered anywhere.

    Attributes:
        answers: (abstract class, class) -> whether the second is a subclass of the first.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[type, type], bool] = {}
        self._token = abc.get_cache_token()

    def ask(self, owners: Iterable[type], cls: type) -> None:
        """Notes what abstract base classes say of a class."""
        for owner in owners:
            self.answers[owner, cls] = _abc._abc_subclasscheck(owner, cls)

    def holds(self) -> bool:
        """True if all of them are what they were."""
        token = abc.get_cache_token()
        if token != self._token:
            if any(_abc._abc_subclasscheck(*pair) is not answer for pair, answer in self.answers.items()):
                return False
            self._token = token
        return True
