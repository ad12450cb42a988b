"""``warnings.warn`` in a step.

Which filter matches, and whether a place has warned before, is decided when the warning is made after the graph, for
the user's file and line. Under filters that the step itself has set (``warnings.catch_warnings``) that is decided at
once.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.notices import Notice, arguments, place
from sidefx_train.compile.capture.world import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.heap.calling import CallingWorld

if not TYPE_CHECKING:
    from sidefx_train.compile.capture.kinds import isinstance

_SPACE = vars(warnings)


def warn(world: CallingWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``warnings.warn(*args, **kwargs)``.

    Raises:
        Warning: under a filter of the step that makes it an error.
    """
    message, category, level, source, skipped = arguments(*args, **kwargs)
    notice = place(world.interp, level, skipped)
    record = world.heap.namespaces.get(id(_SPACE))
    written = {} if record is None else record.values
    filters = written.get("filters", ABSENT)
    if filters is ABSENT or (record is not None and record.snapshot.get("filters") is filters):
        if not any(name in written for name in ("showwarning", "_showwarnmsg_impl")):
            world.defer(notice, (message, category, source), {})
            return
        filters = warnings.filters
    world.touch(filters)
    action = _action(filters, str(message), category, notice)
    if action == "error":
        raise message if isinstance(message, Warning) else category(message)
    if action == "ignore":
        return
    if action != "always":
        world.heap.refuse("SFX111", f"warns under a filter of its own with the action {action!r}")
    error = message if isinstance(message, Warning) else category(message)
    note = world.interp.call(warnings.WarningMessage, (error, category, notice.file, notice.line), {"source": source})
    world.interp.call(world.interp.getattr(warnings, "_showwarnmsg"), (note,), {})


def _action(filters: Any, text: str, category: type, notice: Notice) -> str:
    for action, message, kind, where, number in filters:
        if (
            (message is None or re.compile(message, re.I).match(text))
            and issubclass(category, kind)
            and (where is None or re.compile(where).match(notice.module))
            and number in (0, notice.line)
        ):
            return str(action)
    return str(warnings.defaultaction)  # type: ignore[attr-defined]
