"""What the interpreter asks of the world outside its frames.

The interpreter runs bytecode on real Python objects and knows nothing of tensors, shadows or guards. Every
read or write that could touch something which existed before the capture goes through a :class:`World`.
:class:`DirectWorld` touches the objects themselves, so the interpreter is a plain (slow) Python interpreter:
that is how it is tested. The capturing world (``compile/capture/world/trace_world.py``) works on shadows instead.
"""

from __future__ import annotations

import _thread
import builtins
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sidefx_train.errors import Unsupported

if not TYPE_CHECKING:
    from sidefx_train.compile.common.type_checks import isinstance

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>", "__bool__": lambda self: False})()
"""Answer of a lookup that found nothing."""


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


def hidden_attr(obj: Any, name: str) -> Any:
    """What :meth:`World.instance_attr` gives for an object of C without a ``__dict__`` that may have attributes."""
    return object.__getattribute__(obj, name) if type(obj).__dictoffset__ and hasattr(obj, name) else ABSENT


LOCAL = _thread._local


def space_of_thread(obj: Any) -> dict[str, Any]:
    """The ``__dict__`` that a ``threading.local`` has in the running thread."""
    return LOCAL.__getattribute__(obj, "__dict__")  # type: ignore[no-any-return]


class DirectWorld:
    """The real world: every access is what CPython itself would do."""

    def load_global(self, namespace: dict[str, Any], name: str) -> Any:
        if name in namespace:
            return namespace[name]
        space = namespace.get("__builtins__", builtins)
        if isinstance(space, types.ModuleType):
            space = vars(space)
        if isinstance(space, dict):
            return space.get(name, ABSENT)
        try:
            return space[name]
        except KeyError:
            return ABSENT

    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        namespace[name] = value

    def delete_global(self, namespace: dict[str, Any], name: str) -> bool:
        return namespace.pop(name, ABSENT) is not ABSENT

    def run_in(self, space: dict[str, Any]) -> None:
        return None

    def globals_dict(self, space: dict[str, Any]) -> dict[str, Any]:
        return space

    def load_cell(self, cell: types.CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return ABSENT

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def new_cell(self, cell: types.CellType) -> None:
        return None

    def new_function(self, fn: types.FunctionType) -> None:
        return None

    def imported(self, name: str, space: dict[str, Any], level: int) -> None:
        return None

    def not_imported(self, error: ImportError, name: str) -> None:
        return None

    def found_module(self, name: str) -> Any:
        return sys.modules.get(name, ABSENT)

    def runs(self, fn: types.FunctionType, natively: bool) -> bool:
        return True

    def refusal(self, error: BaseException) -> Unsupported | None:
        return None

    def unheard(self, error: BaseException) -> bool:
        return not isinstance(error, Unsupported)

    def watched(self, value: Any) -> bool:
        return False

    def type_of(self, obj: Any) -> type:
        return type(obj)

    def class_attr(self, cls: type, name: str) -> Any:
        for base in type.__getattribute__(cls, "__mro__"):
            space = type.__getattribute__(base, "__dict__")
            if name in space:
                return space[name]
        return ABSENT

    def instance_attr(self, obj: Any, name: str) -> Any:
        try:
            local = issubclass(type(obj), LOCAL)
            if local and name == "__dict__":
                return space_of_thread(obj)
            space = space_of_thread(obj) if local else object.__getattribute__(obj, "__dict__")
        except AttributeError:
            return hidden_attr(obj, name)
        return space[name] if name in space else ABSENT

    def set_instance_attr(self, obj: Any, name: str, value: Any) -> None:
        if isinstance(obj, type):
            type.__setattr__(obj, name, value)
        elif isinstance(obj, types.ModuleType):
            types.ModuleType.__setattr__(obj, name, value)
        elif issubclass(type(obj), LOCAL):
            LOCAL.__setattr__(obj, name, value)
        else:
            object.__setattr__(obj, name, value)

    def del_instance_attr(self, obj: Any, name: str) -> None:
        if isinstance(obj, type):
            type.__delattr__(obj, name)
        elif isinstance(obj, types.ModuleType):
            types.ModuleType.__delattr__(obj, name)
        elif issubclass(type(obj), LOCAL):
            LOCAL.__delattr__(obj, name)
        else:
            object.__delattr__(obj, name)

    def native_getattr(self, obj: Any, name: str) -> Any:
        return getattr(obj, name)

    def override_getattr(self, obj: Any, name: str) -> Any:
        return ABSENT

    def override_setattr(self, obj: Any, name: str, value: Any) -> bool:
        return False

    def override_delattr(self, obj: Any, name: str) -> bool:
        return False

    def override_operator(self, name: str, args: tuple[Any, ...]) -> Any:
        return ABSENT

    def as_key(self, key: Any) -> Any:
        return key

    def truth(self, value: Any) -> Any:
        return bool(value)

    def grant(self, condition: Any, holds: bool) -> bool:
        return False

    def native_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def intercept_call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ABSENT

    def callback(self, fn: Any, reenter: Callable[..., Any]) -> Any:
        return reenter
