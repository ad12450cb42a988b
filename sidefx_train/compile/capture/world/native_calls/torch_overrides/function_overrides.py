"""``__torch_function__``: modes that the step enters, and classes that override functions of torch.

Torch's C++ code, and its Python functions, ask modes and classes before they compute anything. While native code of the
program runs, a mode of the capture's own is the innermost: torch calls it with exactly the function and the arguments
that eager shows to the program's, whose ``__torch_function__`` is then interpreted.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model.operators import methods_of
from sidefx_train.compile.capture.shadows.objects.tensors import PLAIN_TENSORS
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_call_facts import MAKES_SUBCLASS
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.common.trace_rules import describe
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

_GET_SET = types.GetSetDescriptorType
_READS = frozenset({"item", "tolist"})
_NUMBERS = frozenset({*compat.SYMBOLS, bool, int, float})
ANSWERED_ATTRIBUTES = frozenset({"data", "grad", "_version", "requires_grad", "grad_dtype"})
"""Attributes of tensors that the capture answers itself."""


def _is_arithmetic(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for a conversion within arithmetic of changing numbers, for which eager calls nothing of torch."""
    name = str(attribute_of(func, "__name__", ""))
    return name.startswith("sym_") and bool(args) and all(type(value) in _NUMBERS for value in args)


class FunctionOverrides:
    """The function modes that the step has entered, and the switches of overrides as the program sees them.

    Attributes:
        modes: modes of the program, the innermost last.
        around: those that were entered before the step.
        subclasses_off: how often ``DisableTorchFunctionSubclass`` has been entered and not left.
        all_off: how often ``DisableTorchFunction`` has.
        in_program: the running native code is the program's.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.modes: list[Any] = []
        self.around: list[Any] = []
        self.subclasses_off = self.all_off = 0
        self.in_program = False
        self._native = compat.ForwardingFunctions(self._asked)
        self._handle: Any = None

    @property
    def modes_enabled(self) -> bool:
        """True if functions of torch ask a mode of the program."""
        return bool(self.modes) and not self.all_off

    def begin(self) -> None:
        """Shadows the modes around the step: the capture asks them, and not torch."""
        heap = self.world.heap
        for index, mode in enumerate(compat.function_modes()):
            if type(mode) is not compat.DeviceContext:
                name = f"{type(mode).__qualname__} around the step"
                source = heap.sources.call(heap.sources.const(compat.FunctionModeAt(index), name))
                self.around.append(heap.shadow(mode, source))
        self.modes = list(self.around)

    def enter(self, mode: Any) -> None:
        """Makes a mode of the program the innermost."""
        if self.world.branching:
            self.world.heap.refuse("SFX111", f"a branch of torch.cond enters {type(mode).__qualname__}")
        self.modes.append(mode)

    def leave(self) -> Any:
        """Removes and returns the innermost mode of the program."""
        return self.modes.pop()

    def check_left(self) -> None:
        """Refuses a step, or a part of one, that ends inside a mode or a switch."""
        if self.around and (len(self.modes) < len(self.around) or any(map(operator.is_not, self.modes, self.around))):
            self.world.heap.refuse("SFX111", "leaves a TorchFunctionMode that it has not entered")
        if len(self.modes) > len(self.around):
            self.world.heap.refuse("SFX111", f"stops inside {type(self.modes[-1]).__qualname__}, a TorchFunctionMode")
        if self.subclasses_off or self.all_off:
            self.world.heap.refuse("SFX111", "stops while __torch_function__ is disabled")

    def check_around(self, in_parts: bool) -> None:
        """Refuses what a replay cannot do while the modes around the step are not asked."""
        if not self.around:
            return
        why = "is captured in parts" if in_parts else ""
        why = why or ("makes calls that wait for the graph" if self.world.deferred else "")
        why = why or ("uses tensor subclasses" if self.world.heap.shown.any else "")
        why = why or ("creates the state of an optimizer" if self.world.pending_state else "")
        if why:
            self.world.heap.refuse("SFX111", f"{why}, inside {type(self.around[-1]).__qualname__}, a TorchFunctionMode")

    def wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any], lists: bool = True) -> bool:
        """Returns True if native code may have to ask the program.

        Args:
            args: its positional arguments.
            kwargs: its keyword arguments.
            lists: it may ask the items of lists, too: functions of torch do.
        """
        if self.all_off:
            return False
        if self.modes:
            return True
        values = _given(args, kwargs) if lists else (*args, *kwargs.values())
        return any(map(self._overrides, values))

    def call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a mode or a class of the program makes of a call that the capture would answer itself: torch's
        own function asks them first.

        :data:`ABSENT` if none overrides it.
        """
        if type(fn) is types.MethodWrapperType and type(fn.__self__) is _GET_SET:
            return self._of_field(fn, args)
        if not _is_answered(fn):
            return ABSENT
        if _converts(fn) and not any(safe_isinstance(value, torch.Tensor) for value in args):
            return ABSENT  # of another object, they call a method that torch does not know
        owner = fn.__self__ if type(fn) is types.BuiltinMethodType else None
        if not self.wanted((owner, *args), kwargs):
            return ABSENT
        return self.world.guarded(fn, args, kwargs)

    def asked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a mode or a class of the program makes of an operator that calls functions; :data:`ABSENT` if
        none overrides it."""
        return self._dispatch(func, (args, kwargs)) if self.wanted(args, kwargs) else ABSENT

    def _of_field(self, method: Any, args: tuple[Any, ...]) -> Any:
        """Calls ``__get__`` or ``__set__`` of an attribute of tensors: overrides are told to read attributes so."""
        name, obj = method.__self__.__name__, args[0] if args else None
        if name not in ANSWERED_ATTRIBUTES or not _is_shadow(obj) or self.wanted(args, {}):
            return ABSENT
        if method.__name__ == "__get__":
            return self.world.override_getattr(obj, name)
        return None if self.world.override_setattr(obj, name, args[1]) else ABSENT

    def attribute(self, obj: Any, name: str, *value: Any) -> Any:
        """Reads or sets an attribute of a tensor that the capture would answer itself; see :meth:`call`."""
        if not self.wanted((obj, *value), {}):
            return ABSENT
        return self.world.guarded(setattr if value else getattr, (obj, name, *value), {})

    def operator(self, name: str, args: tuple[Any, ...]) -> bool:
        """Returns True if a tensor subclass among the operands defines the operator in Python."""
        if not self.world.heap.shown.any:
            return False
        methods = methods_of(name) or (f"__{name}__",)
        shown = [
            cls
            for value in args
            if type(value) is compat.FakeTensor and (cls := self._class(value)) not in PLAIN_TENSORS
        ]
        return any(
            type(getattr(cls, method, None)) is types.FunctionType
            and getattr(cls, method) is not getattr(torch.Tensor, method, None)
            for cls in shown
            for method in methods
        )

    def make(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a tensor of a subclass by ``torch.Tensor.__new__``."""
        self.world.heap.shown.admit(cls, f"makes a {cls.__qualname__}")
        return self.show(cls, torch.Tensor, *args, **kwargs)

    def show(self, cls: type, make: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a new tensor, made by a function that asks no overrides, as an instance of a subclass."""
        with self.running(program=False):
            made = make(*args, **kwargs)
        return made if cls is torch.Tensor else self.world.heap.shown.show(made, cls)

    @contextmanager
    def running(self, program: bool) -> Iterator[None]:
        """Context of native code of the program, or of the capture."""
        before, self.in_program = self.in_program, program
        recorder = self.world.tracer.proxy_mode
        depth, recorder.depth = recorder.depth, 0
        with compat.subclasses_kept():
            if self.world.heap.shown.any:
                compat.set_subclasses(program)
            if program:
                self._native.push()
            try:
                yield
            finally:
                if program:
                    self._native.pop()
                recorder.depth = depth
                self.in_program = before

    def _asked(self, func: Any, given: tuple[Any, ...]) -> Any:
        """Answers torch, which is about to run ``func``: for the program, or for the capture's own code."""
        if self.in_program and not self.world.tracer.proxy_mode.depth and not _is_arithmetic(func, given[0]):
            if self._handle is None:
                self._handle = self.world.callbacks.make(self._dispatch, self._dispatch)
            error = self.world.last_error
            answer = self._handle(func, given)
            if answer is not ABSENT:
                self.world.last_error = error  # it holds frames, and these the result
                return answer
        args, kwargs = given[0], given[1] if len(given) > 1 else None
        return func(*args, **(kwargs or {}))

    def _dispatch(self, func: Any, given: tuple[Any, ...]) -> Any:
        """Calls ``__torch_function__`` of the innermost mode, then of the arguments; :data:`ABSENT` without any."""
        args, kwargs = given[0], given[1] if len(given) > 1 else None
        overloaded = self._overloaded(args, kwargs or {})
        if not self.modes_enabled and not overloaded:
            return ABSENT
        classes = self._classes(func, args, kwargs or {}, overloaded)
        if self.modes_enabled:
            mode = self.modes.pop()
            try:
                answer = self._ask(mode, func, classes, given)
            finally:
                self.modes.append(mode)
            if answer is not NotImplemented:
                return answer
        for value in overloaded:
            answer = self._ask(value, func, classes, given)
            if answer is not NotImplemented:
                return answer
        self.world.heap.refuse("SFX102", f"no __torch_function__ implements {describe(func)}")

    def _ask(self, owner: Any, func: Any, classes: tuple[type, ...], given: tuple[Any, ...]) -> Any:
        interp = self.world.interp
        return interp.call(interp.getattr(owner, "__torch_function__"), (func, classes, *given), {})

    def _overrides(self, value: Any) -> bool:
        """Returns True if the class of a value has a ``__torch_function__`` that torch calls now."""
        if self.subclasses_off:
            return False
        if type(value) is not compat.FakeTensor:
            return compat.overrides_functions(type(value))
        return self.world.heap.shown.any and compat.converts_functions(self._class(value))

    def _class(self, value: Any) -> type:
        return self.world.interp.type_of(value) if type(value) is compat.FakeTensor else type(value)

    def _overloaded(self, args: Any, kwargs: Any) -> list[Any]:
        """Returns the arguments whose classes override functions, one for each class, subclasses first."""
        found: list[Any] = []
        for value in _given(args, kwargs):
            cls = self._class(value)
            if self._overrides(value) and all(self._class(other) is not cls for other in found):
                place = next((i for i, other in enumerate(found) if issubclass(cls, self._class(other))), len(found))
                found.insert(place, value)
        return found

    def _classes(self, func: Any, args: Any, kwargs: Any, overloaded: list[Any]) -> tuple[type, ...]:
        """Returns the classes that ``__torch_function__`` is told."""
        reads = attribute_of(func, "__name__") in _READS and type(func) is not types.FunctionType
        if reads or (type(func) is types.MethodWrapperType and type(func.__self__) is _GET_SET):
            return (self._class(args[0]),)
        if type(func) is not types.FunctionType or self.subclasses_off:
            return tuple(map(self._class, overloaded))
        told: dict[type, None] = dict.fromkeys(map(self._class, overloaded))
        for value in _given(args, kwargs):  # functions in Python also name plain tensors
            if safe_isinstance(value, torch.Tensor) and self._class(value) is torch.Tensor:
                told[torch.Tensor] = None
        return tuple(told)


def _given(args: Any, kwargs: Any) -> Iterator[Any]:
    """Yields the arguments of a call, and the items of lists and tuples among them."""
    for value in (*args, *kwargs.values()):
        if type(value) is list or type(value) is tuple:
            yield from value
        else:
            yield value


@functools.cache
def _overridable() -> frozenset[Any]:
    with no_warnings():  # torch changes filters while it makes its table
        return compat.overridable_python_functions()


def _is_shadow(value: Any) -> bool:
    """Returns True for the shadow of a tensor, a wrapper subclass among them."""
    return type(value) is compat.FakeTensor or compat.is_wrapper(value)


def _converts(fn: Any) -> bool:
    return fn is int or fn is float or fn is bool


def _is_answered(fn: Any) -> bool:
    """Returns True for functions of torch that ask for overrides, and whose calls the capture may answer itself."""
    if type(fn) is types.FunctionType:
        return fn in registry.INTERCEPTORS and fn in _overridable()
    if _converts(fn):
        return True
    public = fn
    if type(fn) is types.BuiltinMethodType:
        if _is_shadow(fn.__self__):
            public = getattr(torch.Tensor, fn.__name__, None)
        elif not safe_isinstance(fn.__self__, type):
            return False
    elif type(fn) is not types.MethodDescriptorType or not issubclass(torch.Tensor, fn.__objclass__):
        return False
    if attribute_of(public, "__name__") in MAKES_SUBCLASS:  # torch asks none
        return False
    answered = type(public).__hash__ is not None and public in registry.INTERCEPTORS
    return answered or attribute_of(public, "__name__") in _READS
