"""Code of the program that a log record or a warning runs: it may read what a step changes before or after it."""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Iterator
from typing import Any

from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.type_checks import safe_isinstance


def own_code(logger: logging.Logger | None) -> str | None:
    """Returns the name of a handler, filter, formatter or function of the program that a call runs; ``None`` if
    libraries do all of it.

    Args:
        logger: a logger that is given a record; ``None`` for a warning.
    """
    for part in _parts(logger) if logger is not None else (warnings.showwarning, warnings.formatwarning):
        function = safe_isinstance(part, (types.FunctionType, types.MethodType))
        kind = part if function or safe_isinstance(part, type) else type(part)
        if not is_library(str(kind.__module__)):
            return str(kind.__qualname__)
    return None


def _parts(logger: logging.Logger) -> Iterator[Any]:
    """Yields what takes part in handling a record of a logger."""
    yield logger
    yield logging.getLogRecordFactory()
    yield from logger.filters
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            yield handler
            yield from handler.filters
            yield from (each for each in (handler.formatter, getattr(handler, "stream", None)) if each is not None)
        current = current.parent if current.propagate else None
