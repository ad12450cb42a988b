"""Protocols of the interpreter: what it asks of the world outside its frames, and what its parts ask of it.

The interpreter runs bytecode on real Python objects and knows nothing of tensors, shadows or guards. Every read or
write that could touch something which existed before the capture goes through a :class:`World`. The object model, the
builtins and the opcode handlers know the interpreter by :class:`InterpreterAPI` alone.
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
        """Value of ``name`` in a function's globals, else in builtins, else :data:`ABSENT`."""

    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None: ...

    def delete_global(self, namespace: dict[str, Any], name: str) -> bool:
        """True if the name was there."""

    def run_in(self, space: dict[str, Any]) -> None:
        """Told of each dict that executed code is about to use as its globals or locals."""

    def globals_dict(self, space: dict[str, Any]) -> dict[str, Any]:
        """What ``globals()`` gives in a function whose globals are ``space``."""

    def load_cell(self, cell: types.CellType) -> Any:
        """Contents of a cell, :data:`ABSENT` if empty."""

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        """Sets a cell; ``value=ABSENT`` empties it."""

    def new_cell(self, cell: types.CellType) -> None:
        """Told of each cell that the interpreter creates."""

    def new_function(self, fn: types.FunctionType) -> None:
        """Told of each function that the interpreted program makes."""

    def imported(self, name: str, space: dict[str, Any], level: int) -> None:
        """Told of each ``import`` statement that has run: what it asked for, and where it stands."""

    def not_imported(self, error: ImportError, name: str) -> None:
        """Told of each ``import`` statement that has failed: why, and the full name that it asked for."""

    def found_module(self, name: str) -> Any:
        """What ``sys.modules`` has under a name, or :data:`ABSENT`."""

    def runs(self, fn: types.FunctionType, natively: bool) -> bool:
        """Told of each Python function that is about to run; one that the policy would run natively is interpreted
        all the same if this says no."""

    def type_of(self, obj: Any) -> type:
        """The class the user's program must see (``torch.Tensor`` for a fake tensor, ``int`` for a symbolic int)."""

    def class_attr(self, cls: type, name: str) -> Any:
        """Raw attribute found along ``cls.__mro__`` (no descriptor call), else :data:`ABSENT`."""

    def instance_attr(self, obj: Any, name: str) -> Any:
        """Entry ``name`` of the instance ``__dict__`` of ``obj``, else :data:`ABSENT` (also without a ``__dict__``).

        For a class or a module object: an entry of its own namespace.
        """

    def set_instance_attr(self, obj: Any, name: str, value: Any) -> None:
        """Default store: what ``object.__setattr__`` does once no data descriptor has taken it."""

    def del_instance_attr(self, obj: Any, name: str) -> None:
        """Default deletion; raises ``AttributeError`` as ``object.__delattr__`` does."""

    def native_getattr(self, obj: Any, name: str) -> Any:
        """``getattr`` by C code: slots, getset descriptors, C types. May raise AttributeError."""

    def override_getattr(self, obj: Any, name: str) -> Any:
        """First look at every attribute load: a finished answer, or :data:`ABSENT` to go the normal way."""

    def override_setattr(self, obj: Any, name: str, value: Any) -> bool:
        """First look at every attribute store: True if it has been dealt with."""

    def override_delattr(self, obj: Any, name: str) -> bool: ...

    def override_operator(self, name: str, args: tuple[Any, ...]) -> Any:
        """First look at operators on objects: ``name`` is that of the function in :mod:`operator`
        (``getitem``, ``setitem``, ``delitem``, ``contains``, ``add``, ``iadd``, ``lt``, ``is_`` , ``neg``, ...) or
        ``iter``, ``next``, ``format`` (value, spec), ``str``, ``repr``, ``ascii``, ``build_string`` (parts).
        A finished answer, or :data:`ABSENT`."""

    def as_key(self, key: Any) -> Any:
        """What to hash for ``key``: a number that the world represents otherwise has no hash of its own."""

    def truth(self, value: Any) -> Any:
        """``bool(value)`` for values without a Python-level ``__bool__``/``__len__``; True or False."""

    def grant(self, condition: Any, holds: bool) -> bool:
        """Takes the truth of a value for granted that is known only later; false where that cannot be."""

    def native_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a C callable (or a Python one marked native) on values of this world."""

    def intercept_call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """First look at every call (already unwrapped from bound methods: ``self`` is ``args[0]``).

        A finished answer, or :data:`ABSENT` to go the normal way (inline Python functions, run C ones natively).
        May raise :class:`~sidefx_train.errors.Unsupported`.
        """

    def refusal(self, error: BaseException) -> Unsupported | None:
        """Asked about every exception in a frame: what it stands for if it is not one of the program's own."""

    def unheard(self, error: BaseException) -> bool:
        """True if an exception may end where nobody catches it, in the clean-up of what dies."""

    def watched(self, value: Any) -> bool:
        """True if the program notices when the object dies, or something that it holds."""

    def callback(self, fn: Any, reenter: Callable[..., Any]) -> Any:
        """A Python callable about to be handed to C code; ``reenter(*args, **kwargs)`` interprets it. Returns what to
        hand over (usually ``reenter``)."""


class InliningPolicy(Protocol):
    """Decides which Python functions are interpreted."""

    def inline(self, fn: types.FunctionType) -> bool:
        """True to interpret ``fn``, false to call it natively."""


class InterpreterAPI(Protocol):
    """The interpreter as its parts see it; ``Interpreter`` (``interpreter.py``) documents each member."""

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
