"""``warnings.warn`` of the interpreted program: warnings name the program's lines, not the interpreter's."""

from __future__ import annotations

import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.exceptions import is_own
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.frame import Frame
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


class WarningSite:
    """The module and line that a warning refers to.

    Args:
        space: the module's globals.
        file: its file.
        line: the line.

    Attributes:
        registry: the module's ``__warningregistry__`` of warnings that were shown; created when needed.
    """

    def __init__(self, space: dict[str, Any], file: str, line: int) -> None:
        self._place = space, file, line
        self.__qualname__ = self.__name__ = "warn"

    def place(self) -> tuple[dict[str, Any], str, int]:
        """Returns the module's globals, its file and the line."""
        return self._place

    def module_of(self, space: dict[str, Any]) -> str:
        """Returns the name of the module with these globals."""
        return str(space.get("__name__") or "<string>")

    def __call__(self, message: Any, category: Any, source: Any = None) -> None:
        space, file, line = self.place()
        registry = space.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, file, line, self.module_of(space), registry, None, source)


class NamedSite(WarningSite):
    """A line that ``warnings.warn_explicit`` is given; no registry keeps what it has shown.

    Args:
        file: its file.
        line: the line.
        module: the module's name; by default, Python makes it from the file's.
    """

    def __init__(self, file: str, line: int, module: str | None) -> None:
        super().__init__({}, file, line)
        self._module = (file.removesuffix(".py") or "<unknown>") if module is None else module
        self.__qualname__ = self.__name__ = "warn_explicit"

    def module_of(self, space: dict[str, Any]) -> str:
        return self._module

    def __call__(self, message: Any, category: Any, source: Any = None) -> None:
        _, file, line = self.place()
        warnings.warn_explicit(message, category, file, line, self._module, None, None, source)


class CallerSite(WarningSite):
    """The line that calls the step, or one further out: another one at every call.

    Args:
        level: 1 for the line that calls the step, 2 for that which calls its function.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self.__qualname__ = self.__name__ = "warn"

    def place(self) -> tuple[dict[str, Any], str, int]:
        outer: types.FrameType | None = sys._getframe(1)
        level = self._level
        while outer is not None and (is_own(outer.f_code) or level > 1):
            level -= not is_own(outer.f_code)
            outer = outer.f_back
        if outer is None:
            return vars(sys), "sys", 1
        return outer.f_globals, outer.f_code.co_filename, outer.f_lineno


def arguments(
    message: Any,
    category: Any = None,
    stacklevel: Any = 1,
    source: Any = None,
    *,
    skip_file_prefixes: tuple[str, ...] = (),
) -> tuple[Any, Any, int, Any, tuple[str, ...]]:
    """Parses the arguments of ``warnings.warn``: message, category, level, source and skipped files.

    Raises:
        TypeError: the category is not a Warning subclass.
    """
    if safe_isinstance(message, Warning):
        category = type(message)
    elif category is None:
        category = UserWarning
    if not (safe_isinstance(category, type) and issubclass(category, Warning)):
        kind = category.__name__ if safe_isinstance(category, type) else type(category).__name__
        raise TypeError(f"category must be a Warning subclass, not '{kind}'")
    return message, category, int(stacklevel), source, tuple(skip_file_prefixes)


def place(interp: InterpreterAPI, level: int, skipped: tuple[str, ...] = ()) -> WarningSite:
    """Returns the module and line of a warning with this ``stacklevel``."""
    if skipped:
        level = max(level, 2)
    frame = interp.current_frame
    if level <= 0 or (frame is not None and _of_imports(frame.code.co_filename)):
        while frame is not None and level > 1:
            frame, level = frame.back, level - 1
    else:
        while frame is not None and level > 1:
            level -= 1
            frame = _next_outside_imports(frame, skipped)
    if frame is not None:
        return WarningSite(frame.globals, frame.code.co_filename, frame.line)
    return CallerSite(level)


def _next_outside_imports(frame: Frame, skipped: tuple[str, ...]) -> Frame | None:
    found = frame.back
    while found is not None and (_of_imports(found.code.co_filename) or found.code.co_filename.startswith(skipped)):
        found = found.back
    return found


def _of_imports(file: str) -> bool:
    return "importlib" in file and "_bootstrap" in file


def warn(interp: InterpreterAPI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Calls ``warnings.warn(*args, **kwargs)`` immediately."""
    message, category, level, source, skipped = arguments(*args, **kwargs)
    site = place(interp, level, skipped)
    space, file, line = site.place()
    registry = space.setdefault("__warningregistry__", {})
    interp.native(
        warnings.warn_explicit,
        (message, category, file, line, site.module_of(space), registry, None, source),
        {},
    )
