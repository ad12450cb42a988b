"""Interpreted generators, for interpreted code and C code."""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.bytecode_versions import CLOSE_RETURNS, SEND_KEEPS_RECEIVER
from sidefx_train.compile.capture.interpreter.exceptions import cleaned, set_context
from sidefx_train.compile.capture.interpreter.frame import RETURNED, YIELDED, Frame, Handled
from sidefx_train.compile.capture.interpreter.frame_objects import frame_object
from sidefx_train.compile.common.sentinels import NATIVE_CODE
from sidefx_train.compile.common.type_checks import safe_isinstance, set_field
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


class InterpretedGenerator:
    """A suspended :class:`Frame` with the methods of a generator object."""

    __slots__ = ("__name__", "__qualname__", "__weakref__", "frame", "handled", "interp", "running", "started")

    def __init__(self, interp: InterpreterAPI, frame: Frame) -> None:
        self.interp = interp
        self.frame: Frame = frame
        self.handled = Handled()
        self.running = False
        self.started = False
        self.__name__ = frame.code.co_name
        self.__qualname__ = frame.code.co_qualname

    def advance(self, value: Any, error: BaseException | None = None) -> int:
        """Runs to the next yield or to the end; the value is then in ``frame.result``.

        Args:
            value: result of the suspended ``yield``.
            error: exception to raise at the suspended ``yield`` instead.

        Returns:
            ``YIELDED`` or ``RETURNED``; ``RETURNED`` also if the generator had finished before.
        """
        interp, frame = self.interp, self.frame
        if self.running:
            raise ValueError("generator already executing")
        if frame.done:
            frame.result = None
            if error is not None:
                raise error
            return RETURNED
        if not self.started and value is not None:
            raise TypeError("can't send non-None value to a just-started generator")
        if error is None:
            frame.push(value)
        self.started = True
        self.running = True
        outer = interp.handled
        self.handled.previous = outer
        interp.handled = self.handled
        if error is not None:
            set_context(error, self.handled.value)
            interp.in_flight = error
        try:
            signal = interp.execute(frame, error)
        except StopIteration as stop:
            set_field(stop, "__traceback__", cleaned(stop.__traceback__))
            raise _stop_error(stop) from stop
        finally:
            interp.handled = outer
            self.handled.previous = None
            self.running = False
            if frame.done:
                frame.stack.clear()
                frame.locals.clear()
                self.handled.value = None
        return signal

    @property
    def delegate(self) -> Any:
        """The iterator of a suspended ``yield from``, else ``None``."""
        frame = self.frame
        if frame.done or self.running or not self.started or not frame.stack:
            return None
        return frame.stack[-1] if frame.instructions[frame.pc - 1].target >= 0 else None

    def __iter__(self) -> InterpretedGenerator:
        return self

    def __next__(self) -> Any:
        """Implement next(self)."""
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Resumes with ``value``; returns the next yielded value."""
        signal = self.advance(value)
        return self._answer(signal)

    def _answer(self, signal: int) -> Any:
        result, self.frame.result = self.frame.result, None
        if signal == RETURNED:
            raise StopIteration(result) if result is not None else StopIteration()
        return result

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        """Raises an exception at the suspended ``yield``; returns the next yielded value."""
        error = _thrown(self.interp, kind, value, trace)
        return self._answer(self._throw(error))

    def _throw(self, error: BaseException) -> int:
        delegate = self.delegate
        frame = self.frame
        if delegate is None:
            return self.advance(None, error)
        answer: Any = _NO_THROW
        if safe_isinstance(error, GeneratorExit):
            _, raised = self._delegated(close_iterator, delegate)
        else:
            answer, raised = self._delegated(_throw_into, delegate, error)
        if safe_isinstance(raised, StopIteration) and not safe_isinstance(error, GeneratorExit):
            frame.pc = frame.instructions[frame.pc - 1].target
            if not SEND_KEEPS_RECEIVER:
                frame.pop()
            return self.advance(raised.value)
        if raised is not None:
            return self.advance(None, raised)
        if answer is _NO_THROW:
            return self.advance(None, error)
        frame.result = answer
        return YIELDED

    def _delegated(self, action: Any, *args: Any) -> tuple[Any, BaseException | None]:
        """Calls ``action`` with this generator marked as executing; returns its result and the exception it raised."""
        if self.running:
            raise ValueError("generator already executing")
        self.running = True
        interp, frame = self.interp, self.frame
        frame.back, interp.current_frame = interp.current_frame, frame
        try:
            return action(interp, *args), None
        except Unsupported:
            raise
        except BaseException as raised:
            return None, raised
        finally:
            interp.current_frame, frame.back = frame.back, None
            self.running = False

    def close(self) -> Any:
        """Raises ``GeneratorExit`` at the suspended ``yield``."""
        if self.frame.done:
            return None
        if not self.started:
            self.frame.done = True
            return None
        try:
            signal = self._throw(GeneratorExit())
        except (StopIteration, GeneratorExit) as end:
            self.interp.in_flight = None
            set_field(end, "__traceback__", None)  # its frames hold the exception
            return None
        if signal != RETURNED:
            raise RuntimeError("generator ignored GeneratorExit")
        result, self.frame.result = self.frame.result, None
        return result if CLOSE_RETURNS else None

    def __del__(self) -> None:
        frame = self.frame
        suspended = self.started and not self.running and not frame.done
        if suspended and not self.interp.stopped and frame.instructions[frame.pc - 1].handler is not None:
            try:
                self.close()
            except BaseException as error:
                if self.interp.world.unheard(error):
                    raise
                self.interp.stopped = None
                self.interp.note_dropped(f"the generator {self.__qualname__}")

    @property
    def gi_frame(self) -> Any:
        return None if self.frame.done else frame_object(self.frame)

    @property
    def gi_running(self) -> bool:
        return self.running

    @property
    def gi_code(self) -> types.CodeType:
        return self.frame.code

    @property
    def gi_yieldfrom(self) -> Any:
        return self.delegate

    @property
    def gi_suspended(self) -> bool:
        return self.started and not self.running and not self.frame.done

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle 'generator' object")

    def __repr__(self) -> str:
        return f"<generator object {self.__qualname__} at {id(self):#x}>"


InterpretedGenerator.__name__ = "generator"  # in messages of C code
Generator.register(InterpretedGenerator)
for _member in vars(InterpretedGenerator).values():
    if safe_isinstance(_member, types.FunctionType):
        NATIVE_CODE.add(id(_member.__code__))
    elif safe_isinstance(_member, property):
        NATIVE_CODE.update(
            id(_fn.__code__) for _fn in (_member.fget, _member.fset) if safe_isinstance(_fn, types.FunctionType)
        )

_NO_THROW = object()


def report_unraisable(error: BaseException, source: Any) -> None:
    """Passes an exception that cannot propagate to ``sys.unraisablehook``."""
    details = types.SimpleNamespace(
        exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__, err_msg=None, object=source
    )
    if sys.unraisablehook is not sys.__unraisablehook__:
        sys.unraisablehook(details)
    else:  # CPython's default hook accepts only its own record type
        print(f"Exception ignored in: {source!r}", file=sys.stderr)
        traceback.print_exception(error)


def _stop_error(stop: StopIteration) -> RuntimeError:
    error = RuntimeError("generator raised StopIteration")
    set_field(error, "__context__", stop)
    return error


def _thrown(interp: InterpreterAPI, kind: Any, value: Any, trace: Any) -> BaseException:
    """Returns the exception given by the arguments of ``throw``."""
    if safe_isinstance(kind, BaseException):
        if value is not None:
            raise TypeError("instance exception may not have a separate value")
        error = kind
    elif safe_isinstance(kind, type) and issubclass(kind, BaseException):
        if safe_isinstance(value, kind):
            error = value
        else:
            args = () if value is None else value if safe_isinstance(value, tuple) else (value,)
            error = interp.call(kind, args, {})
    else:
        raise TypeError(
            f"exceptions must be classes or instances deriving from BaseException, not {type(kind).__name__}"
        )
    if trace is not None:
        if not safe_isinstance(trace, types.TracebackType):
            raise TypeError("throw() third argument must be a traceback object")
        set_field(error, "__traceback__", trace)
    return error


def _throw_into(interp: InterpreterAPI, target: Any, error: BaseException) -> Any:
    """Calls ``target.throw``; returns a marker if it has no such method."""
    if safe_isinstance(target, InterpretedGenerator):
        return target._answer(target._throw(error))
    try:
        method = interp.getattr(target, "throw")
    except AttributeError:
        return _NO_THROW
    return interp.call(method, (error,), {})


def close_iterator(interp: InterpreterAPI, target: Any) -> None:
    """Calls ``target.close`` if it exists."""
    if safe_isinstance(target, InterpretedGenerator):
        target.close()
        return
    try:
        method = interp.getattr(target, "close")
    except AttributeError:
        return
    except Unsupported:
        raise
    except Exception as error:  # CPython reports it and continues
        interp.in_flight = None
        set_field(error, "__traceback__", cleaned(error.__traceback__))
        report_unraisable(error, target)
        return
    interp.call(method, (), {})
