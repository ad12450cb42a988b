"""Compiles generated source, so that tracebacks and debuggers show its lines."""

from __future__ import annotations

import linecache
from typing import Any


def compile_function(name: str, source: str, names: dict[str, Any], file: str) -> Any:
    """Returns a function of generated source; ``linecache`` has the source until :func:`forget_source`.

    Args:
        name: name of the function.
        source: the source that defines it.
        names: its globals.
        file: file name in tracebacks; one that begins with ``<sidefx_train`` counts as this library's.
    """
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names[name]


def forget_source(file: str) -> None:
    """Removes the source of a function that is no longer used."""
    linecache.cache.pop(file, None)
