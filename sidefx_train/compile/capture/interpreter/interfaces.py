"""Protocols between the interpreter, the world outside its frames, and its own parts.

The interpreter runs bytecode on real Python objects; it has no notion of tensors, shadows or guards. Every read or
write that could touch an object from before the capture goes through a :class:`World`. The object model, the builtins
and the opcode handlers use the interpreter only through :class:`InterpreterAPI`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

from sidefx_train.compile.capture.interpreter.frame import Frame, Handled
from sidefx_train.errors import Unsupported


class World(Protocol):
    """Reads and writes outside the interpreter's own frames."""

    def load_global(self, namespace: dict[str, Any], name: str) -> Any:
        """Returns ``name`` from a function's globals, else from builtins, else :data:`ABSENT`."""

    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None: ...

    def delete_global(self, namespace: dict[str, Any], name: str) -> bool:
        """Returns True if the name existed."""

    def run_in(self, space: dict[str, Any]) -> None:
        """Called for each dict that executed code is about to use as its globals or locals."""

    def globals_dict(self, space: dict[str, Any]) -> dict[str, Any]:
        """Returns what ``globals()`` returns in a function whose globals are ``space``."""

    def load_cell(self, cell: types.CellType) -> Any:
        """Returns the contents of a cell, :data:`ABSENT` if empty."""

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        """Sets a cell; ``value=ABSENT`` empties it."""

    def new_cell(self, cell: types.CellType) -> None:
        """Called for each cell that the interpreter creates."""

    def new_function(self, fn: types.FunctionType) -> None:
        """Called for each function that the interpreted program creates."""

    def imported(self, name: str, space: dict[str, Any], level: int) -> None:
        """Called after each successful ``import`` statement with its name, globals and level."""

    def not_imported(self, error: ImportError, name: str) -> None:
        """Called after each failed ``import`` statement with the error and the full name of the module."""

    def found_module(self, name: str) -> Any:
        """Returns the entry of ``sys.modules`` for a name, or :data:`ABSENT`."""

    def runs(self, fn: types.FunctionType, natively: bool, answered: bool = False) -> bool:
        """Called before each Python function runs, or where :meth:`intercept_call` has ``answered`` its call; False
        makes the interpreter inline one that the policy would run natively."""

    def type_of(self, obj: Any) -> type:
        """Returns the class that the program must see (``torch.Tensor`` for a fake tensor, ``int`` for a symbolic
        int)."""

    def class_attr(self, cls: type, name: str) -> Any:
        """Returns the raw attribute found along ``cls.__mro__`` (no descriptor call), else :data:`ABSENT`."""

    def instance_attr(self, obj: Any, name: str) -> Any:
        """Returns entry ``name`` of the instance ``__dict__`` of ``obj``, else :data:`ABSENT` (also without a
        ``__dict__``).

        For a class or module: an entry of its own namespace.
        """

    def set_instance_attr(self, obj: Any, name: str, value: Any) -> None:
        """Default store: what ``object.__setattr__`` does if no data descriptor handles it."""

    def del_instance_attr(self, obj: Any, name: str) -> None:
        """Default deletion; raises ``AttributeError`` like ``object.__delattr__``."""

    def native_getattr(self, obj: Any, name: str) -> Any:
        """``getattr`` by C code: slots, getset descriptors, C types. May raise AttributeError."""

    def override_getattr(self, obj: Any, name: str) -> Any:
        """Called first for every attribute load; returns the value, or :data:`ABSENT` for the default protocol."""

    def override_setattr(self, obj: Any, name: str, value: Any) -> bool:
        """Called first for every attribute store; returns True if it was handled."""

    def override_delattr(self, obj: Any, name: str) -> bool: ...

    def override_operator(self, name: str, args: tuple[Any, ...]) -> Any:
        """Called first for operators on objects. ``name`` is the function's name in :mod:`operator` (``getitem``,
        ``setitem``, ``delitem``, ``contains``, ``add``, ``iadd``, ``lt``, ``is_`` , ``neg``, ...) or ``iter``,
        ``next``, ``format`` (value, spec), ``str``, ``repr``, ``ascii``, ``build_string`` (parts). Returns the result,
        or :data:`ABSENT` for the default protocol."""

    def as_key(self, key: Any) -> Any:
        """Returns the object to hash for ``key``: the world's representation of a number has no hash of its own."""

    def truth(self, value: Any) -> Any:
        """Returns ``bool(value)`` for values without a Python-level ``__bool__``/``__len__``."""

    def grant(self, condition: Any, holds: bool) -> bool:
        """Assumes the truth of a value that only the graph knows; returns False if that is not possible."""

    def usual_truth(self, frame: Frame) -> bool | None:
        """Returns the truth that the condition of a frame's running jump usually has, if that is known."""

    def native_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a C callable (or a Python one marked native) on values of this world."""

    def intercept_call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called first for every call (bound methods are unwrapped: ``self`` is ``args[0]``).

        Returns the result, or :data:`ABSENT` for the default (inline Python functions, run C ones natively).
        May raise :class:`~sidefx_train.errors.Unsupported`.
        """

    def refusal(self, error: BaseException) -> Unsupported | None:
        """Called for every exception in a frame; returns a refusal if the exception is not the program's own."""

    def unheard(self, error: BaseException) -> bool:
        """Returns True if an exception may remain uncaught in a finalizer."""

    def watched(self, value: Any) -> bool:
        """Returns True if the program can observe the finalization of the object or of something that it holds."""

    def callback(self, fn: Any, reenter: Callable[..., Any]) -> Any:
        """Returns what to pass to C code in place of a Python callable (usually ``reenter``, which interprets it)."""


class InliningPolicy(Protocol):
    """Decides which Python functions are interpreted."""

    def inline(self, fn: types.FunctionType) -> bool:
        """Returns True to interpret ``fn``, False to call it natively."""


class InterpreterAPI(Protocol):
    """The interpreter's interface to its parts; ``Interpreter`` (``interpreter.py``) documents each member."""

    world: World
    type_of: Callable[[Any], type]
    current_frame: Frame | None
    handled: Handled
    in_flight: BaseException | None
    stopped: Unsupported | None
    handled_natively: BaseException | None
    substitute_frames: dict[int, tuple[types.FrameType, Frame]]

    def call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def native(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def run_body(
        self, code: types.CodeType, space: dict[str, Any], closure: tuple[types.CellType, ...] | None, namespace: Any
    ) -> Any: ...

    def execute(self, frame: Frame, pending: BaseException | None = None) -> int: ...

    def note_dropped(self, what: str) -> None: ...

    def getattr(self, obj: Any, name: str) -> Any: ...

    def getattr_or(self, obj: Any, name: str, default: Any) -> Any: ...

    def setattr(self, obj: Any, name: str, value: Any) -> None: ...

    def delattr(self, obj: Any, name: str) -> None: ...

    def getitem(self, obj: Any, key: Any) -> Any: ...

    def setitem(self, obj: Any, key: Any, value: Any) -> None: ...

    def delitem(self, obj: Any, key: Any) -> None: ...

    def iterate(self, obj: Any) -> list[Any]: ...
