"""``__torch_function__``: the stack of function modes, classes that override functions, and what torch asks of both."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import _tensor, overrides
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext as DeviceContext

from sidefx_train.torch_compat.wrapper_tensors import NO_OVERRIDE

AS_SUBCLASS = torch.Tensor.as_subclass
MAKE_SUBCLASS = torch.Tensor._make_subclass  # type: ignore[attr-defined]
CONVERTS = _tensor._convert
"""Makes results of functions instances of a subclass."""

DISABLES_SUBCLASSES = torch._C.DisableTorchFunctionSubclass
DISABLES_FUNCTIONS = torch._C.DisableTorchFunction
FUNCTION_SWITCHES = (DISABLES_SUBCLASSES, DISABLES_FUNCTIONS)
"""Context managers that disable overrides."""
PUSHES_FUNCTION_MODE = overrides._push_mode
POPS_FUNCTION_MODE = overrides._pop_mode
NUMBER_OF_FUNCTION_MODES = torch._C._len_torch_function_stack
FUNCTION_MODE_AT = torch._C._get_function_stack_at
HAS_FUNCTION_MODE = torch._C._is_torch_function_mode_enabled
HAS_OVERRIDE = torch._C._has_torch_function
HAS_OVERRIDE_OF_ARGUMENTS = (torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic)
"""They ask whether a mode, or the class of an argument, handles functions of torch."""
SUBCLASSES_ENABLED = torch._C._is_torch_function_enabled
FUNCTIONS_DISABLED = torch._C._is_torch_function_all_disabled
CHANGES_FUNCTION_MODES = (
    torch._C._push_on_torch_function_stack,
    torch._C._pop_torch_function_stack,
    torch._C._set_torch_function_state,
    torch._C._EnableTorchFunction,
)
"""What changes the stack or the switches past the functions above."""

_ABSENT: Any = object()


class ForwardingFunctions(TorchFunctionMode):
    """Calls a function with every overridable function of torch that is called, and how it was called.

    Args:
        run: called with the function, the positional arguments of the call of ``__torch_function__`` that follow the
            classes, and the classes that torch found.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = _ABSENT) -> Any:
        return self.run(func, (args,) if kwargs is _ABSENT else (args, kwargs))

    def push(self) -> None:
        """Makes it the innermost mode."""
        torch._C._push_on_torch_function_stack(self)

    @staticmethod
    def pop() -> None:
        """Removes the innermost mode."""
        torch._C._pop_torch_function_stack()


@functools.cache
def overridable_python_functions() -> frozenset[Any]:
    """Returns the functions and methods of torch, written in Python, that ask for overrides."""
    named = overrides.get_overridable_functions().values()
    return frozenset(fn for functions in named for fn in functions if type(fn) is types.FunctionType)


def subclasses_off() -> Any:
    """Returns a context in which torch calls no ``__torch_function__`` of tensor subclasses."""
    return torch._C.DisableTorchFunctionSubclass()


def set_subclasses(enabled: bool) -> None:
    """Lets torch call ``__torch_function__`` of tensor subclasses from now on, or not."""
    states = torch._C._TorchFunctionState
    torch._C._set_torch_function_state(states.ENABLED if enabled else states.SUBCLASSES_DISABLED)


def subclasses_enabled() -> bool:
    return bool(torch._C._get_torch_function_state() == torch._C._TorchFunctionState.ENABLED)


@contextmanager
def subclasses_kept() -> Iterator[None]:
    """Context that restores whether torch calls ``__torch_function__``."""
    before = torch._C._get_torch_function_state()
    try:
        yield
    finally:
        torch._C._set_torch_function_state(before)


def with_class(tensor: torch.Tensor, cls: type) -> torch.Tensor:
    """Returns a new tensor as an instance of a subclass of its class."""
    tensor.__class__ = cls  # type: ignore[assignment]
    return tensor


def can_have_class(cls: type) -> bool:
    """Returns True if a tensor can become an instance of a class: none of its base classes adds a slot."""
    made = torch.Tensor()
    with subclasses_off(), suppress(TypeError):
        made.__class__ = cls  # type: ignore[assignment]
    return type(made) is cls


def converts_functions(cls: Any) -> bool:
    """Returns True if torch calls ``__torch_function__`` of a tensor subclass, its own or ``torch.Tensor``'s."""
    return cls is not torch.Tensor and cls.__torch_function__ is not NO_OVERRIDE


def overrides_functions(cls: Any) -> bool:
    """Returns True if a class handles functions of torch by a ``__torch_function__`` that is not ``torch.Tensor``'s
    own."""
    known = _OVERRIDES.get(cls)
    if known is None:
        spaces = (type.__getattribute__(base, "__dict__") for base in type.__getattribute__(cls, "__mro__"))
        found = next((space["__torch_function__"] for space in spaces if "__torch_function__" in space), None)
        known = _OVERRIDES[cls] = found is not None and found is not NO_OVERRIDE and found is not _OF_TENSORS
    return known


_OF_TENSORS = vars(torch.Tensor)["__torch_function__"]
_OVERRIDES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
