"""Calls that the capture answers itself, before they are interpreted or run natively."""

from __future__ import annotations

import _thread
import contextvars
import functools
import logging
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model import formatting, str_format
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import ListRecord
from sidefx_train.compile.capture.shadows.deferred_values import TEXT_METHODS
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.world.deferred import deferred_warnings
from sidefx_train.compile.capture.world.deferred.argument_snapshot import deferred_string
from sidefx_train.compile.capture.world.deferred.deferral import own_code, own_stream
from sidefx_train.compile.capture.world.deferred.deferred_strings import deferred_in
from sidefx_train.compile.capture.world.deferred.file_writes import FileWrites
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_call_facts import DISABLERS, HASHABLE, NO_OWNER, TORCH_DIR, inside, joins
from sidefx_train.compile.capture.world.native_calls import builtin_methods, contextvars_and_locks, weakref_calls
from sidefx_train.compile.capture.world.native_calls import lru_cache as caches
from sidefx_train.compile.capture.world.symbolic_numbers import host_functions, number_calls
from sidefx_train.compile.capture.world.symbolic_numbers.array_functions import computes_arrays
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.draws.generator_states import is_generator
from sidefx_train.compile.common.host_programs import OF_NUMPY
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.sentinels import ABSENT, transparent
from sidefx_train.compile.common.type_checks import attribute_of, class_method_of, safe_isinstance

_CALLED_BY_CLASS = frozenset({*compat.OPERATORS, torch.jit.ScriptFunction})
"""Classes of C whose instances are called by interceptors of the class, or natively."""
_MOST_EXACT = 2
"""Limit of changing numbers of which ``statistics`` is interpreted: it compares the exact fractions of each."""
_WRAPPERS = (types.MethodWrapperType, types.WrapperDescriptorType)


class Interception:
    """Answers calls by registered interceptors, and those of single functions and classes that a capture knows.

    Each rule returns :data:`ABSENT` for a call that is none of its own.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp = world.heap, world.interp
        self._handled: set[Any] = set()
        self._in_whole = False
        self._file_writes = FileWrites(world)
        self._rules = (
            self._registered,
            self._drawn,
            self._on_changing_array,
            self._in_statistics,
            self._python_function,
            self._weak_reference,
            self._number_or_text,
            self._printed_or_deferred,
            self._of_deferred_array,
            self._fact_of_process,
            self._context_or_lock,
            self._cached_or_contained,
        )

    @transparent
    def intercept(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call; :data:`ABSENT` if it is to be interpreted or run natively."""
        answer = self.world.functions.call(fn, args, kwargs)
        if answer is not ABSENT:
            return answer
        if type(fn) in _CALLED_BY_CLASS:  # their Python code only finds the kernel
            handler = registry.INTERCEPTORS.get(type(fn))
            answer = ABSENT if handler is None else handler(self.world, (fn, *args), kwargs)
            return self.world.native_call(fn, args, kwargs) if answer is ABSENT else answer
        for rule in self._rules:
            answer = rule(fn, args, kwargs)
            if answer is not ABSENT:
                return answer
        return ABSENT

    @transparent
    def _registered(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Asks interceptors of a class, a C function, a class method in C, or a method of a tensor or of the engine."""
        cls = type(fn)
        free = cls in HASHABLE and safe_isinstance(attribute_of(fn, "__self__"), NO_OWNER)
        if free or cls is np.ufunc or safe_isinstance(fn, type):
            handler = registry.INTERCEPTORS.get(fn)
            answer = ABSENT if handler is None else handler(self.world, args, kwargs)
            if answer is not ABSENT:
                return answer
        if cls is not types.BuiltinMethodType:
            return ABSENT
        if safe_isinstance(fn.__self__, type):
            handler = registry.INTERCEPTORS.get(class_method_of(fn))
        elif type(fn.__self__) is compat.FakeTensor:
            handler = registry.INTERCEPTORS.get(getattr(torch.Tensor, fn.__name__, None))
        elif type(fn.__self__) is compat.ENGINE:
            handler = registry.INTERCEPTORS.get(getattr(compat.ENGINE, fn.__name__, None))
        elif type(fn.__self__) in compat.FUNCTION_SWITCHES:
            handler = registry.INTERCEPTORS.get(getattr(type(fn.__self__), fn.__name__))
        else:
            return ABSENT
        return ABSENT if handler is None else handler(self.world, (fn.__self__, *args), kwargs)

    def _drawn(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draws by a method in C of a random generator of Python's or NumPy's, and computes what functions of NumPy
        make of an array that was drawn."""
        if computes_arrays(fn):
            return ABSENT if "out" in kwargs else self.world.random_draws.derived(fn, args, kwargs)
        if fn is np.random.seed or fn is np.random.default_rng:
            handler = registry.INTERCEPTORS.get(fn)  # the program may have replaced it
            return ABSENT if handler is None else handler(self.world, args, kwargs)
        if (fn is list or fn is tuple) and len(args) == 1 and self.world.random_draws.is_drawn(args[0]):
            items = self.world.interp.call(iter, args, {}) if type(args[0]) is np.ndarray else ABSENT
            return fn(items) if type(items) is type(iter([])) else ABSENT
        bound = type(fn) is types.BuiltinMethodType
        owner = fn.__self__ if bound else args[0] if args else None
        if not is_generator(owner) and type(owner) is not np.ndarray:
            return ABSENT
        if bound:
            fn, args = getattr(type(fn.__self__), fn.__name__, None), (fn.__self__, *args)
        handler = registry.INTERCEPTORS.get(fn) if type(fn).__hash__ is not None else None
        return ABSENT if handler is None else handler(self.world, args, kwargs)

    def _on_changing_array(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuses to interpret a library's function of an array whose contents change, if that has stopped a capture:
        it runs natively as a whole."""
        spec = self.world.specialization
        if not (spec.changing_arrays or spec.perhaps_changing) or type(fn) is not types.FunctionType:
            return ABSENT
        for value in (*args, *kwargs.values()):
            record = self.heap.record_of(value) if type(value) is np.ndarray else None
            if safe_isinstance(record, ArrayRecord) and record.changes and is_library(fn.__module__ or ""):
                self.world.array_functions.add(fn.__code__)
                if fn.__code__ in spec.native_array_functions:
                    record.fill()
        return ABSENT

    def _in_statistics(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuses to interpret a function of ``statistics`` of numbers that differ at every call, such as a history: it
        runs natively as a whole."""
        if type(fn) is not types.FunctionType or fn.__module__ != "statistics":
            return ABSENT
        for value in (*args, *kwargs.values()):
            record = self.heap.record_of(value)
            if not safe_isinstance(record, ListRecord):
                continue
            if record.grows:
                what = f"{trace_rules.describe(fn)} reads {record.base.label}, which differs at every call"
                self.heap.refuse("SFX114", what)
            record.fill()
        changing = [each for each in inside((args, kwargs)) if safe_isinstance(each, compat.SYMBOLS)]
        if len(changing) > _MOST_EXACT or any(map(compat.is_unbacked, changing)):
            self.heap.refuse("SFX106", f"{trace_rules.describe(fn)} of numbers that differ at every call")
        return ABSENT

    @transparent
    def _python_function(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers methods that interceptors know by name, and functions made for torch's own compiler."""
        if type(fn) is not types.FunctionType:
            return ABSENT
        handlers = self.world.method_interceptors.get(fn.__name__)
        for base, handler in handlers or () if args else ():
            if issubclass(type(args[0]), base):
                answer = handler(self.world, args, kwargs)
                if answer is not ABSENT:
                    return answer
        found = host_functions.call(self.world, fn, args, kwargs)
        if found is not ABSENT:
            return found
        if fn.__name__ == "graph_break" and fn.__module__.startswith("torch._dynamo"):
            return None
        if fn.__dict__ and compat.assumes_constant(fn):
            answer = caches.constant_result(fn, args, kwargs)
            if answer is not ABSENT:
                return answer
        file = fn.__code__.co_filename
        if file.endswith(DISABLERS) and file.startswith(TORCH_DIR):
            for name in ("_torchdynamo_orig_callable", "__wrapped__"):
                if getattr(fn, name, None) is not None:  # a method has an outside object: it is read like any attribute
                    return self.interp.call(self.interp.getattr(fn, name), args, kwargs)
        if not self._in_whole and trace_rules.is_whole(str(fn.__globals__.get("__name__")), fn.__name__):
            return self._whole(fn, args, kwargs)
        return ABSENT

    def _whole(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Interprets a call inside which no part of the step ends: frames below that of this method are not kept."""
        self._in_whole = True
        try:
            return self.interp.call(fn, args, kwargs)
        finally:
            self._in_whole = False

    def _weak_reference(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes and calls weak references, and calls what a proxy refers to."""
        if type(fn) in weakref.ProxyTypes:
            return self.interp.call(weakref_calls.through(self.world, fn), args, kwargs)
        if safe_isinstance(fn, weakref.ReferenceType):
            return ABSENT if args or kwargs else weakref_calls.called(self.world, fn)
        if fn is weakref.finalize:
            self.heap.refuse("SFX103", "makes a weakref.finalize, which is called when its object is gone")
        if fn is weakref.ref:
            return weakref_calls.make(self.world, args)
        if fn is weakref.proxy:
            weakref_calls.note_target(self.world, args)
        if fn is weakref.ref.__new__:
            self.heap.refuse("SFX104", f"makes a {trace_rules.describe(args[0])}")
        return ABSENT

    def _number_or_text(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Converts numbers, and makes strings of values that are known only after the graph."""
        found = self.world.deferred_arrays.call(fn, args, kwargs)
        if found is not ABSENT:
            return found
        found = self.world.computed_objects.call(fn, args, kwargs)
        if found is not ABSENT:
            return found
        if fn is int or fn is float or fn is bool:
            return number_calls.convert_number(self.world, fn, args)
        if safe_isinstance(fn, type) and fn in OF_NUMPY:
            return self.world.computed_numbers.call(fn, args, kwargs)
        if joins(fn) and len(args) == 1 and hasattr(type(args[0]), "__next__"):
            return self.interp.call(fn, (self.interp.iterate(args[0]),), kwargs)
        if joins(fn):
            self.world.touch(args)  # only then the strings that it joins are visible
        if safe_isinstance(attribute_of(fn, "__self__"), str) and (found := deferred_in([*args, *kwargs.values()])):
            if str_format.is_formatted_by_fields(fn, args, kwargs):
                return ABSENT
            self.world.operators.check_hidden(fn.__name__, found)
            return deferred_string(self.world, fn, args, kwargs)
        if (
            type(fn) is types.MethodDescriptorType
            and fn in TEXT_METHODS
            and args
            and self.interp.type_of(args[0]) is str
        ):
            return deferred_string(self.world, fn, args, kwargs) if deferred_in(args) else ABSENT
        if type(fn) in _WRAPPERS and fn.__name__ in ("__repr__", "__str__"):
            owner = fn.__self__ if type(fn) is types.MethodWrapperType else args[0] if args else None
            if fn.__objclass__ is not object and not safe_isinstance(owner, (str, torch.Tensor, *compat.SYMBOLS)):
                return self.world.wrapped_text(fn.__name__, owner)
        return ABSENT

    def _printed_or_deferred(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keeps what only shows or records something for after the graph."""
        if fn is print and self._writes_inside(kwargs.get("file")):
            self._print_now(args, **kwargs)
            return None
        written = self._file_writes.call(fn, args, kwargs)
        if written is not ABSENT:
            return written
        if not trace_rules.is_deferred(fn, args):
            return ABSENT
        if fn is warnings.warn:
            self._check_own_code(None)
            return deferred_warnings.warn(self.world, args, kwargs)
        if fn is warnings.warn_explicit:
            self._check_own_code(None)
            return deferred_warnings.warn_explicit(self.world, args, kwargs)
        logger = args[0] if args else attribute_of(fn, "__self__")
        if safe_isinstance(logger, logging.Logger):
            record = self.heap.record_of(logger)
            if record is None:
                self.heap.refuse("SFX103", "logs through a logger that the step has created")
            self._check_own_code(record.real)
        elif trace_rules.looks_at_callers(fn):  # a function of the module
            self._check_own_code(logging.root)
        elif fn is not print:  # a progress bar, or what else may write to them
            for stream in ("stdout", "stderr"):
                own = self._own_stream(stream)
                if own is not None:
                    self.heap.refuse("SFX103", f"writes to {own}, which may read what the step changes")
        self.world.defer(fn, args, kwargs)
        return None

    def _of_deferred_array(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.world.deferred_arrays.refuse_to_library(fn, args, kwargs)
        return ABSENT

    def _check_own_code(self, logger: logging.Logger | None) -> None:
        """Refuses to defer a warning, or a record of a logger, that the program's own code handles."""
        own = own_code(logger)
        if own is not None:
            self.heap.refuse("SFX103", f"logs or warns through {own}, which may read what the step changes")
        name = f"handlers of {'warnings' if logger is None else logger.name} in the program"
        self._guard_libraries(id(logger), functools.partial(own_code, logger), name)

    def _own_stream(self, stream: str) -> str | None:
        """Returns the name of the program's own class whose object is this stream of ``sys``, guarded if it is none."""
        own = own_stream(stream)
        if own is None:
            self._guard_libraries(stream, functools.partial(own_stream, stream), f"the program's own sys.{stream}")
        return own

    def _guard_libraries(self, key: Any, ask: Callable[[], str | None], name: str) -> None:
        """Guards that only libraries handle what is shown: one guard for all records of a logger."""
        if key not in self._handled:
            self._handled.add(key)
            sources = self.heap.sources
            self.heap.guard("equal", sources.call(sources.const(ask, name)), None)

    def _fact_of_process(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers for addresses, the recursion limit, the thread and subclasses."""
        if type(fn) is types.BuiltinMethodType and fn.__name__ == "__subclasses__" and not args and not kwargs:
            found = self.world.queries.subclasses(fn.__self__) if safe_isinstance(fn.__self__, type) else ABSENT
            return found if found is ABSENT or self.world.new_classes.keys().isdisjoint(map(id, found)) else ABSENT
        frame = self.interp.current_frame
        if fn is id and len(args) == 1 and not kwargs:
            return self.world.keys.address(args[0], frame)
        if fn is sys.getrecursionlimit and not args and not kwargs:  # a capture sets its own limit
            source = self.heap.sources.call(self.heap.sources.const(fn, "sys.getrecursionlimit"))
            self.heap.guard("equal", source, self.interp.max_depth)
            return self.interp.max_depth
        if fn is _thread.get_ident and frame is not None and self.heap.trusts(frame.globals):
            return fn()  # a library distinguishes threads: a step runs in one
        return ABSENT

    def _context_or_lock(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads and sets context variables, and takes locks."""
        owner = attribute_of(fn, "__self__")
        if type(fn) is types.MethodDescriptorType and args:
            kind = type(args[0])
            if issubclass(kind, (contextvars.ContextVar, *contextvars_and_locks.LOCKS)):
                owner, args = args[0], args[1:]
        if safe_isinstance(owner, contextvars.ContextVar):
            return self.world.context.call(fn.__name__, owner, args)
        if safe_isinstance(owner, contextvars_and_locks.LOCKS):
            return self.world.locks.call(fn.__name__, owner, args, kwargs)
        return ABSENT

    def _cached_or_contained(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls cached functions, and C functions that read or change containers."""
        if type(fn) is functools._lru_cache_wrapper:
            return caches.call(self.world, fn, args, kwargs)
        if type(fn) in (types.BuiltinFunctionType, types.BuiltinMethodType):
            return builtin_methods.container_method(self.world, fn, args, kwargs)
        return ABSENT

    def _writes_inside(self, file: Any) -> bool:
        """Returns True if ``print`` writes to an object that the step may read, or that may read what the step changes:
        a Python object of the program, or created in the step."""
        if file is None:
            space = self.heap.namespaces.get(id(vars(sys)))
            if space is None or "stdout" not in space.values:
                return self._own_stream("stdout") is not None
            file = space.values["stdout"]
            if file is None:
                return False
            if file is space.snapshot.get("stdout"):
                return self._own_stream("stdout") is not None
            return True
        record = self.heap.record_of(file)
        return record is None or record.shadow is not record.real or own_stream(record.real) is not None

    def _print_now(
        self, args: tuple[Any, ...], sep: Any = None, end: Any = None, file: Any = None, flush: Any = False
    ) -> None:
        file = self.interp.getattr(sys, "stdout") if file is None else file
        write = self.interp.getattr(file, "write")
        for index, value in enumerate(args):
            if index:
                self.interp.call(write, (" " if sep is None else sep,), {})
            self.interp.call(write, (formatting.to_str(self.interp, value),), {})
        self.interp.call(write, ("\n" if end is None else end,), {})
        if flush:
            self.interp.call(self.interp.getattr(file, "flush"), (), {})
