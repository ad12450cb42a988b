"""``warnings.warn`` in a step.

The matching filter, and whether a location has warned before, are determined when the warning is issued after the
graph, for the user's file and line. Whether the warning is an error is determined immediately, and guarded, since the
code after it would not run. With filters that the step itself has set (``warnings.catch_warnings``), everything is
determined immediately.
"""

from __future__ import annotations

import inspect
import operator
import types
import warnings
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins.warn import NamedSite, WarningSite, arguments, place
from sidefx_train.compile.capture.recording.warning_watch import watched
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import ListRecord
from sidefx_train.compile.common.sentinels import NATIVE_CODE
from sidefx_train.compile.common.thread_warnings import matches
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


_SPACE = vars(warnings)


def warn(world: CaptureContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``warnings.warn(*args, **kwargs)``.

    Raises:
        Warning: a filter of the step makes it an error.
    """
    message, category, level, source, skipped = arguments(*args, **kwargs)
    site = place(world.interp, level, skipped)
    warn_at(world, site, message, category, source)


def warn_explicit(world: CaptureContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``warnings.warn_explicit(*args, **kwargs)``.

    Raises:
        TypeError: arguments that Python refuses.
        Warning: a filter makes it an error.
        Unsupported: it is given a registry, which it would read and change.
    """
    try:
        given = _EXPLICIT.bind(*args, **kwargs).arguments
    except TypeError:
        return world.interp.native(warnings.warn_explicit, args, kwargs)  # raises Python's
    message, category, file, line = (given[name] for name in ("message", "category", "filename", "lineno"))
    module = given.get("module")
    known = type(file) is str and type(line) is int and type(module) in (str, type(None))
    if not known or given.get("registry") is not None or given.get("module_globals") is not None:
        world.heap.refuse("SFX111", "calls warnings.warn_explicit with a registry, or with values of the graph")
    if safe_isinstance(message, Warning):
        category = type(message)
    elif not (safe_isinstance(category, type) and issubclass(category, Warning)):
        return world.interp.native(warnings.warn_explicit, args, kwargs)
    return warn_at(world, NamedSite(file, line, module), message, category, given.get("source"))


def _explicit(
    message: Any,
    category: Any,
    filename: Any,
    lineno: Any,
    module: Any = None,
    registry: Any = None,
    module_globals: Any = None,
    source: Any = None,
) -> None:
    """Parameters of ``warnings.warn_explicit``, which has no signature."""


_EXPLICIT = inspect.signature(_explicit)


def warn_at(world: CaptureContext, site: WarningSite, message: Any, category: type, source: Any = None) -> None:
    """Issues a warning for a line.

    Raises:
        Warning: a filter makes it an error.
    """
    filters = filters_of_step(world)
    if filters is None:
        _raise_if_error(world, site, message, category)
        world.defer(site, (message, category, source), {})
        return
    warn_now(world, filters, site, message, category, source)


def warn_now(
    world: CaptureContext,
    filters: Any,
    site: WarningSite,
    message: Any,
    category: type,
    source: Any = None,
    may_be_once: bool = False,
) -> None:
    """Does with a warning what filters of the step say.

    Args:
        world: the capture.
        filters: the step's list.
        site: the line that the warning names.
        message: its text, or the warning itself.
        category: its class.
        source: the object that it is about.
        may_be_once: the code that warns may do so only once in a process.

    Raises:
        Warning: a filter makes it an error.
    """
    world.touch(filters)
    action = _action(filters, str(message), category, site)
    if action == "ignore":
        return
    if action != "error" and (action != "always" or may_be_once):
        world.heap.refuse("SFX111", f"warns under a local filter with the action {action!r}")
    error = message if safe_isinstance(message, Warning) else category(message)
    if action == "error":
        raise error
    _, file, line = site.place()
    note = world.interp.call(warnings.WarningMessage, (error, category, file, line), {"source": source})
    world.interp.call(world.interp.getattr(warnings, "_showwarnmsg"), (note,), {})


def filters_of_step(world: CaptureContext) -> Any:
    """Returns the filters while the step has changed them, or how warnings are shown; else ``None``."""
    return world.heap.namespaces[id(_SPACE)].values.get("filters", warnings.filters) if sets_filters(world) else None


def sets_filters(world: CaptureContext) -> bool:
    """Returns True while the step has changed which warnings are shown, or how."""
    record = world.heap.namespaces.get(id(_SPACE))
    if record is None:
        return False
    for name in ("filters", *_SHOWING):
        if name in record.values and record.values[name] is not record.snapshot.get(name, record.real.get(name)):
            return True
    filters: Any = record.values.get("filters")
    held = world.heap.record_of(filters) if filters is not None else None
    if not safe_isinstance(held, ListRecord):
        return False
    return len(filters) != len(held.snapshot) or not all(map(operator.is_, filters, held.snapshot))


_SHOWING = ("showwarning", "_showwarnmsg_impl")
_TRACERS = ("torch._functorch._aot_autograd", "torch._higher_order_ops")
"""Modules that trace branches of higher-order operators; they filter their warnings, which the program never sees."""


def call_watched(world: CaptureContext, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a Python function natively; if it warns, it must be interpreted so that the warning is replayed.

    Raises:
        Unsupported: it called ``warnings.warn``; ``world.warns`` contains its code then.
    """
    if id(fn.__code__) in NATIVE_CODE:
        return fn(*args, **kwargs)

    def refuse(frame: types.FrameType | None) -> None:
        codes: set[types.CodeType] = set()
        while frame is not None and frame.f_code is not call_watched.__code__:
            if str(frame.f_globals.get("__name__")).startswith(_TRACERS):
                return
            codes.add(frame.f_code)
            frame = frame.f_back
        if codes - world.specialization.inlined_code:
            world.warns |= codes
            world.heap.refuse("SFX111", f"{fn.__qualname__} warns, so it must be interpreted")  # before it does

    with watched(refuse):
        return fn(*args, **kwargs)


def _raise_if_error(world: CaptureContext, site: WarningSite, message: Any, category: type) -> None:
    """Raises a warning that an outside filter makes an error; guards the decision."""
    text = str(message) if safe_isinstance(message, Warning) else message
    known = text if type(text) is str else None
    verdict = Verdict(known, category, site)
    sources = world.heap.sources
    source = sources.slot(sources.const(verdict, f"the filter of the warning at line {site.place()[2]}"), "is_error")
    answer = verdict.is_error()
    world.heap.guard("equal", sources.call(source), answer)
    if answer is None:
        world.heap.refuse(
            "SFX106", "issues a warning whose message is known only after the step, and a filter depends on it"
        )
    if answer:
        error = message if safe_isinstance(message, Warning) else category(message)
        world.last_error = (error, warnings.warn, world.locate())
        raise error


class Verdict:
    """Decides whether the filters make a warning an error.

    Args:
        text: its message, ``None`` if known only after the step.
        category: its class.
        site: the line it refers to.
    """

    def __init__(self, text: str | None, category: type, site: WarningSite) -> None:
        self.text = text
        self.category = category
        self.site = site

    def is_error(self) -> bool | None:
        """Returns the current answer, ``None`` if it depends on an unknown message."""
        filters = warnings.filters
        if not any(each[0] == "error" for each in filters):
            return str(warnings.defaultaction) == "error"  # type: ignore[attr-defined]
        space, _, line = self.site.place()
        for action, message, kind, where, number in filters:
            if not issubclass(self.category, kind) or number not in (0, line):
                continue
            if not matches(where, self.site.module_of(space)):
                continue
            if message is not None and self.text is None:
                return None
            if matches(message, str(self.text)):
                return bool(action == "error")
        return str(warnings.defaultaction) == "error"  # type: ignore[attr-defined]


def _action(filters: Any, text: str, category: type, site: WarningSite) -> str:
    space, _, line = site.place()
    for action, message, kind, where, number in filters:
        if (
            matches(message, text)
            and issubclass(category, kind)
            and matches(where, site.module_of(space))
            and number in (0, line)
        ):
            return str(action)
    return str(warnings.defaultaction)  # type: ignore[attr-defined]
