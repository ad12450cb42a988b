"""The interpreter: runs Python functions instruction by instruction over a :class:`World`.

Its parts: ``bytecode_versions.py`` and ``code.py`` decode code objects, ``dispatch.py`` binds instructions to the
handlers in ``opcodes/``, ``frame.py`` is one activation, ``object_model/`` and ``builtins/`` implement Python's
protocols, ``exceptions.py`` unwinds, ``generators.py`` suspends. They use the interpreter through ``interfaces.py``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from sidefx_train.compile.capture.interpreter import exceptions
from sidefx_train.compile.capture.interpreter.builtins import introspection
from sidefx_train.compile.capture.interpreter.dispatch import code_info
from sidefx_train.compile.capture.interpreter.frame import NULL, Frame
from sidefx_train.compile.capture.interpreter.interfaces import InliningPolicy, World
from sidefx_train.compile.capture.interpreter.object_model import (
    attributes,
    function_calls,
    iteration,
    operators,
)
from sidefx_train.compile.common.sentinels import ABSENT, NATIVE_CODE, transparent
from sidefx_train.compile.common.signal_handlers import HandlerRaised
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance, set_field
from sidefx_train.compile.common.user_code import is_user_file
from sidefx_train.errors import Location, Unsupported


class Suspended(BaseException):
    """Stops a program before the instruction ``stop_at``.

    Attributes:
        frames: outermost first.
        handled: the exception being handled.
    """

    def __init__(self, frames: list[Frame], handled: BaseException | None) -> None:
        super().__init__("suspended")
        self.frames = frames
        self.handled = handled


_TAKE_HOOKS = frozenset(
    {"register_hook", "register_prehook", "register_post_accumulate_grad_hook", "_push_saved_tensors_default_hooks"}
    | {"apply_", "map_", "map2_"}
)
"""Names of C functions whose arguments C code calls, now or in a backward."""

_CALLING_MODULES = ("torch.autograd.functional", "torch.autograd.graph", "torch.nn.functional", "torch._tensor")
"""Modules whose Python functions run natively and may call an argument, or give it to such a C function."""


def _calls_arguments(fn: Any) -> bool:
    if type(fn) is types.FunctionType:
        return fn.__module__ in _CALLING_MODULES
    return attribute_of(fn, "__name__") in _TAKE_HOOKS


class Interpreter:
    """Interprets Python functions.

    Args:
        world: handles every access outside the frames.
        policy: decides which functions are interpreted; all, if ``None``.

    Attributes:
        current_frame: the innermost running frame, ``None`` outside.
        handled: the handled exceptions, as ``sys.exception()`` must report them.
        type_of: the world's function for the class that the program sees.
        stopped: the propagating :class:`Unsupported`, if any: until the next :meth:`run` no handler, ``finally`` or
            ``__exit__`` of the program runs.
        begun: number of instructions begun.
        stop_at: number of the instruction before which to raise :class:`Suspended`; 0 for none.
        dropping: refusal if the finalizer of an object that the instruction dropped cannot run here, or another one
            because of what the instruction did.
        follows: the program stops after that instruction, not before it.
        handled_natively: the exception that the interpreter's own caller handles, if any.
        substitute_frames: frame objects that the program received, with their interpreted frames, by ``id``.
    """

    def __init__(self, world: World, policy: InliningPolicy | None = None) -> None:
        self.world = world
        self.type_of: Callable[[Any], type] = world.type_of
        self.policy = policy
        self.current_frame: Frame | None = None
        self.handled = exceptions.Handled()
        self.in_flight: BaseException | None = None
        self.stopped: Unsupported | None = None
        self.thread = threading.get_ident()
        self.depth = 0
        self.begun = 0
        self.stop_at = 0
        self.dropping: Unsupported | None = None
        self.follows = False
        self.handled_natively = sys.exception()
        self.substitute_frames: dict[int, tuple[types.FrameType, Frame]] = {}
        self.max_depth = sys.getrecursionlimit()

    @transparent
    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Calls ``fn`` from outside.

        Raises:
            Unsupported: a construct that cannot be interpreted, or that the world refuses; with its location.
        """
        limit = sys.getrecursionlimit()
        if self.depth == 0:
            self.max_depth = limit
            self.stopped = None
            self.thread = threading.get_ident()
            sys.setrecursionlimit(limit * 12 + 1000)
        try:
            return self.call(fn, args, kwargs or {})
        except (Unsupported, Suspended, HandlerRaised):
            raise
        except BaseException as error:
            if self.stopped is None:
                set_field(error, "__traceback__", exceptions.cleaned(error.__traceback__))
                raise
            raise self.stopped from error  # C code replaced it by another error
        finally:
            if self.depth == 0:
                sys.setrecursionlimit(limit)
                self.in_flight = None

    def close(self) -> None:
        """Ends the program: suspended generators are dropped without running again."""
        self.stopped = Unsupported("SFX111", "the interpreter was closed")

    @transparent
    def call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)`` as the interpreted program calls it."""
        kind = type(fn)
        while kind is types.MethodType:
            args = (fn.__self__, *args)
            fn = fn.__func__
            kind = type(fn)
        answer = self.world.intercept_call(fn, args, kwargs)
        if answer is not ABSENT:
            if kind is types.FunctionType:
                self.world.runs(fn, natively=False, answered=True)
            return answer
        if kind is types.FunctionType:
            return self.inline(fn, args, kwargs)
        substitute = introspection.find(self, fn)
        if substitute is not None:
            return substitute(self, args, kwargs)
        if safe_isinstance(fn, type):
            return function_calls.construct(self, fn, args, kwargs)
        if kind is types.BuiltinFunctionType:
            return self.native(fn, args, kwargs)
        if kind is types.MethodWrapperType:
            return introspection.call_method_wrapper(self, fn, args, kwargs)
        return function_calls.call_object(self, fn, args, kwargs)

    @transparent
    def inline(self, fn: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Interprets a Python function, or calls it natively if the policy says so."""
        code = fn.__code__
        if id(code) in NATIVE_CODE:
            return fn(*args, **kwargs)
        natively = self.policy is not None and not self.policy.inline(fn)
        if self.world.runs(fn, natively) and natively:
            return self.native(fn, args, kwargs)
        info = code_info(code)
        if info.is_async:
            raise Unsupported("SFX111", f"call of the async function {fn.__qualname__}")
        slots = function_calls.bind_arguments(self, fn, info, args, kwargs)
        frame = Frame(info, fn.__globals__, slots, fn.__closure__)
        self.execute(frame)
        result, frame.result = frame.result, None  # a generator's frame outlives this call
        return result

    def run_body(
        self, code: types.CodeType, space: dict[str, Any], closure: tuple[types.CellType, ...] | None, namespace: Any
    ) -> Any:
        """Runs a class body or executed code: names are stored in the mapping ``namespace``."""
        info = code_info(code)
        frame = Frame(info, space, [NULL] * len(info.slots), closure, namespace)
        self.execute(frame)
        return frame.result

    def native(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls C code through the world; Python callables among the arguments re-enter the interpreter."""
        if introspection.keeps_callables(fn):
            return self.world.native_call(fn, args, kwargs)
        if safe_isinstance(fn, type) and fn.__module__ == "itertools":  # ``groupby(values, type)`` sees shadows
            args = tuple(self.type_of if value is type else value for value in args)
            kwargs = {k: self.type_of if value is type else value for k, value in kwargs.items()}
        if _calls_arguments(fn):
            method = bool(args) and getattr(type(args[0]), fn.__name__, None) is fn  # the object itself is not called
            args = (*args[:method], *map(self.reentering_hook, args[method:]))
            kwargs = {name: self.reentering_hook(value) for name, value in kwargs.items()}
        for value in args:
            if function_calls.runs_python(value):
                args = tuple(self.reentering(v) for v in args)
                break
        for value in kwargs.values():
            if function_calls.runs_python(value):
                kwargs = {k: self.reentering(v) for k, v in kwargs.items()}
                break
        return self.world.native_call(fn, args, kwargs)

    def reentering(self, fn: Any) -> Any:
        """Returns what to pass to C code in place of ``fn``."""
        if not function_calls.runs_python(fn) or (type(fn) is types.FunctionType and id(fn.__code__) in NATIVE_CODE):
            return fn
        return self._wrapped(fn)

    def _wrapped(self, fn: Any) -> Any:
        def reenter(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return fn(*args, **kwargs)  # frames belong to the thread of the program
            return self.call(fn, args, kwargs)

        NATIVE_CODE.add(id(reenter.__code__))
        return self.world.callback(fn, reenter)

    def reentering_hook(self, fn: Any) -> Any:
        """Returns what to pass to C code that will call ``fn``: a function, or an object with a ``__call__``."""
        return self._wrapped(fn) if function_calls.is_python_callable(fn) else self.reentering(fn)

    def execute(self, frame: Frame, pending: BaseException | None = None) -> int:
        """Runs ``frame`` until it returns or yields; the value is left in ``frame.result``.

        Args:
            frame: the frame, fresh or suspended.
            pending: an exception to raise where the frame is suspended.

        Returns:
            ``RETURNED`` or ``YIELDED``.
        """
        if self.depth >= self.max_depth:
            raise RecursionError("maximum recursion depth exceeded")
        self.depth += 1
        frame.back = self.current_frame
        self.current_frame = frame
        instructions, counts = frame.instructions, frame.counts
        try:
            while True:
                try:
                    if pending is not None:
                        raise pending
                    while True:
                        instr = instructions[frame.pc]
                        frame.began = self.begun = self.begun + 1
                        if self.begun == self.stop_at:
                            self.suspend()
                        counts[frame.pc] = self.begun
                        frame.pc += 1
                        signal = instr.run(self, frame, instr)
                        if self.dropping is not None and not self.is_suspended_next(frame):
                            raise self.taken_dropping()
                        if signal is not None:
                            return signal
                except Unsupported as stop:
                    self.stopped = stop
                    if stop.location is None:
                        stop.location = self.location()
                    raise
                except HandlerRaised:
                    self.stopped = Unsupported("SFX111", "a signal handler raised")
                    raise
                except BaseException as caught:
                    pending = None
                    refusal = self.world.refusal(caught)
                    if refusal is not None:
                        self.stopped = refusal
                        refusal.location = self.location()
                        raise refusal from caught
                    if self.stopped is not None or not exceptions.unwind(self, frame, caught):
                        raise
                    pending = self.dropping and self.taken_dropping()
        finally:
            self.current_frame = frame.back
            frame.back = None
            self.depth -= 1

    def note_dropped(self, what: str) -> None:
        """Called by an object whose last reference in the program was dropped: it must be finalized natively, here."""
        if self.stopped is None:
            self.dropping = Unsupported("SFX113", f"drops {what}, whose finalizer runs code")

    def stop_after(self, stop: Unsupported) -> None:
        """Stops before the instruction that follows the running one, which takes effect."""
        if self.stopped is None:
            self.dropping, self.follows = stop, True

    def is_suspended_next(self, frame: Frame) -> bool:
        """Returns True if the program is suspended before the next instruction anyway; counts that as begun if the
        stop is before it."""
        follows, self.follows = self.follows, False
        if follows and self.begun + 1 == self.stop_at:
            self.dropping = None
            return True
        if follows:
            frame.began = self.begun = self.begun + 1
        return False

    def taken_dropping(self) -> Unsupported:
        """Returns and clears :attr:`dropping`."""
        refusal, self.dropping = self.dropping, None
        assert refusal is not None, "something was dropped"
        return refusal

    def suspend(self) -> NoReturn:
        """Stops with all frames unchanged; none of their handlers run."""
        self.stopped = Unsupported("SFX111", "the program was suspended")
        frames: list[Frame] = []
        frame = self.current_frame
        while frame is not None:
            frames.append(frame)
            frame = frame.back
        raise Suspended(frames[::-1], self.handled.topmost())

    @contextlib.contextmanager
    def calling_back(self) -> Iterator[None]:
        """While autograd calls functions of the program: their handlers run, also once the program is suspended."""
        stopped, self.stopped = self.stopped, None
        try:
            yield
        finally:
            self.stopped = self.stopped or stopped

    # The protocols, for the world and the other parts.

    def getattr(self, obj: Any, name: str) -> Any:
        return attributes.load(self, obj, name)

    def getattr_or(self, obj: Any, name: str, default: Any) -> Any:
        """``getattr(obj, name, default)``."""
        try:
            return attributes.load(self, obj, name)
        except AttributeError:
            self.in_flight = None
            return default

    def setattr(self, obj: Any, name: str, value: Any) -> None:
        attributes.store(self, obj, name, value)

    def delattr(self, obj: Any, name: str) -> None:
        attributes.delete(self, obj, name)

    def truth(self, value: Any) -> bool:
        return operators.truth(self, value)

    def iter(self, obj: Any) -> Any:
        return iteration.get_iter(self, obj)

    def iterate(self, obj: Any) -> list[Any]:
        """Returns all items of an iterable."""
        return iteration.to_list(self, obj)

    def getitem(self, obj: Any, key: Any) -> Any:
        return operators.getitem(self, obj, key)

    def setitem(self, obj: Any, key: Any, value: Any) -> None:
        operators.setitem(self, obj, key, value)

    def delitem(self, obj: Any, key: Any) -> None:
        operators.delitem(self, obj, key)

    def written_names(self, frame: Frame) -> frozenset[str]:
        """Returns the names that the frame's code stores by ``STORE_ATTR``, ``STORE_GLOBAL`` or ``STORE_DEREF``."""
        return frame.info.written_names

    def location(self) -> Location:
        """Returns the innermost location in the user's own source, or else the innermost location."""
        frame = self.current_frame
        if frame is None:
            return Location("<unknown>", 0)
        item: Frame | None = frame
        while item is not None:
            if is_user_file(item.code.co_filename):
                frame = item
                break
            item = item.back
        return Location(frame.code.co_filename, frame.line, frame.code.co_qualname)
