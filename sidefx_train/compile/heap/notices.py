"""``warnings.warn`` in a step.

Which filter matches, and whether a place has warned before, is decided when the warning is made after the graph, for
the user's file and line. Under filters that the step itself has set (``warnings.catch_warnings``) that is decided at
once.
"""

from __future__ import annotations

import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.world import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.frame import Frame
    from sidefx_train.compile.heap.calling import CallingWorld

_SPACE = vars(warnings)


class Notice:
    """Warns as if from one line of one module.

    Args:
        space: the module's globals.
        file: its file.
        line: the line.
    """

    def __init__(self, space: dict[str, Any], file: str, line: int) -> None:
        self.space = space
        self.file = file
        self.line = line
        self.__qualname__ = self.__name__ = "warn"

    def __call__(self, message: Any, category: Any, source: Any = None) -> None:
        registry = self.space.setdefault("__warningregistry__", {})
        module = self.space.get("__name__") or "<unknown>"
        warnings.warn_explicit(message, category, self.file, self.line, module, registry, self.space, source)


def warn(world: CallingWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``warnings.warn(*args, **kwargs)``.

    Raises:
        Warning: under a filter of the step that makes it an error.
    """
    message, category, level, source = _arguments(*args, **kwargs)
    if isinstance(message, Warning):
        category = type(message)
    category = UserWarning if category is None else category
    if not (isinstance(category, type) and issubclass(category, Warning)):
        raise TypeError(f"category must be a Warning subclass, not '{type(category).__name__}'")
    frame = _place(world, level)
    space = frame.globals if frame is not None else vars(sys)
    file, line = (frame.code.co_filename, frame.line) if frame is not None else ("sys", 1)
    record = world.heap.namespaces.get(id(_SPACE))
    written = {} if record is None else record.values
    filters = written.get("filters", ABSENT)
    if filters is ABSENT or (record is not None and record.snapshot.get("filters") is filters):
        if not any(name in written for name in ("showwarning", "_showwarnmsg_impl")):
            notice = Notice(space, file, line)
            world.defer(notice, (message, category, source), {})
            return
        filters = warnings.filters
    world.touch(filters)
    action = _action(filters, str(message), category, str(space.get("__name__") or "<unknown>"), line)
    if action == "error":
        raise message if isinstance(message, Warning) else category(message)
    if action == "ignore":
        return
    if action != "always":
        world.heap.refuse("SFX111", f"warns under a filter of its own with the action {action!r}")
    error = message if isinstance(message, Warning) else category(message)
    note = world.interp.call(warnings.WarningMessage, (error, category, file, line), {"source": source})
    world.interp.call(world.interp.getattr(warnings, "_showwarnmsg"), (note,), {})


def _arguments(
    message: Any, category: Any = None, stacklevel: Any = 1, source: Any = None, **_: Any
) -> tuple[Any, Any, int, Any]:
    return message, category, int(stacklevel), source


def _place(world: CallingWorld, level: int) -> Frame | None:
    """The frame that a warning is about; frames of the import machinery do not count."""
    frame = world.interp.current_frame
    while frame is not None and level > 1:
        frame, level = frame.back, level - 1
    return frame


def _action(filters: Any, text: str, category: type, module: str, line: int) -> str:
    for action, message, kind, where, number in filters:
        if (
            (message is None or re.compile(message, re.I).match(text))
            and issubclass(category, kind)
            and (where is None or re.compile(where).match(module))
            and number in (0, line)
        ):
            return str(action)
    return str(warnings.defaultaction)  # type: ignore[attr-defined]
