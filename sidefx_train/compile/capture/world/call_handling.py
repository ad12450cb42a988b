"""Calls in the capturing world: what C code may see, what is deferred, what is refused."""

from __future__ import annotations

import functools
import operator
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.builtins.introspection import keeps_callables
from sidefx_train.compile.capture.recording.constant_folding import constant_value
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue, LimitedShadow
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import shows_copy, writes_unasked
from sidefx_train.compile.capture.shadows.objects.tensors import PLAIN_TENSORS
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_call_facts import (
    BARE,
    BUFFERS,
    COMPARES_IDENTITY,
    HASHABLE,
    HASHED,
    MAKES_SUBCLASS,
    ORDERS,
    READS_VALUE,
    REGISTERS_HOOK,
    STORING_METHODS,
    asks_missing,
    inside,
    wants_values,
)
from sidefx_train.compile.capture.world.native_calls import builtin_methods, cpp_warnings, python_conversions
from sidefx_train.compile.capture.world.native_calls import lru_cache as caches
from sidefx_train.compile.capture.world.native_calls.argument_reads import ArgumentReads
from sidefx_train.compile.capture.world.native_calls.class_creation import make_class, makes_class
from sidefx_train.compile.capture.world.native_calls.ctc_lengths import as_tensors, takes_lengths
from sidefx_train.compile.capture.world.native_calls.guarded_calls import GuardedCalls
from sidefx_train.compile.capture.world.symbolic_numbers import concrete_numbers, number_calls
from sidefx_train.compile.capture.world.symbolic_numbers.array_functions import computes_arrays
from sidefx_train.compile.capture.world.symbolic_numbers.scalar_tensors import host_value
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import CONTAINERS
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import attribute_of, deletes, safe_isinstance

_CALLS_METHODS = (repr, str, bytes, bytearray)
_READS_THROUGH = frozenset({np.ndarray, types.MappingProxyType})
_TEXTS = frozenset({str, bytes, bytearray})
_CALLS_METHODS_BY_NAME = COMPARES_IDENTITY | ORDERS | {"__repr__", "__str__", "__format__", "__mod__", "format"}
"""Names of functions and methods of Python's own containers and strings that call methods of their arguments."""
_ASKS = frozenset({types.FunctionType, types.BuiltinFunctionType})
STANDING = (property, staticmethod, classmethod, types.CellType, types.FunctionType, types.ModuleType)
"""Classes that C code can instantiate; outside instances pass through."""
_MOST_LISTED = 32
"""Limit of elements of a tensor whose ``tolist()`` is captured: each is an output of the graph."""

_MAKES_DESCRIPTOR = frozenset({"__new__", "getter", "setter", "deleter"})


def _looks_up_key(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for ``in`` of a dict or set: its keys were prepared when they were stored."""
    return fn is operator.contains and type(args[0]) in HASHED


def _items(held: Any) -> list[Any]:
    return list((list if safe_isinstance(held, list) else deque).__iter__(held))


def _nested(items: Iterator[Any], sizes: tuple[int, ...]) -> Any:
    """Returns the elements of a tensor of these sizes as nested lists."""
    return [_nested(items, sizes[1:]) for _ in range(sizes[0])] if sizes else next(items)


class Calls:
    """Runs, intercepts and refuses calls of C code.

    C code runs on shadows. Before it does, what it is about to read is brought in (:class:`ArgumentReads`); what it
    could change outside is refused by code SFX103 or SFX104; what only shows or records something is deferred.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer
        self.reads = ArgumentReads(world)
        self.guarded = GuardedCalls(world).run

    def native_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs C code, or answers for it, after everything that it reads has been brought in.

        Raises:
            Unsupported: it could change something outside, or needs a value that only the graph computes.
        """
        self._check_registration(fn, args)
        if self.makes_shown(fn):
            return self.world.functions.make(fn, args, kwargs)
        self._check_made_class(fn, args)
        if makes_class(fn, args):  # with a metaclass of torch, too
            return make_class(self.world, fn, args, kwargs)
        torch_call = trace_rules.is_torch_callable(fn)
        if torch_call and compat.communicates_in_cpp(fn):
            self.refuse_call(fn)
        if torch_call:  # it accepts symbols as numbers, but not as flags
            args, kwargs = concrete_numbers.concrete_within((args, kwargs), (torch.SymBool,))
        if type(attribute_of(fn, "__self__")) is torch.Generator:
            answer = self.world.random_draws.of_generator(fn, args)
            if answer is not ABSENT:
                return answer
        if torch_call:
            python_conversions.refuse_in_torch(self.world, fn, (*args, *kwargs.values()))
            answer = self._read_value(fn, args)
        else:
            args = python_conversions.with_position(self.world, fn, args)
            answer, args = self._on_containers(fn, args, kwargs)
        if answer is not ABSENT:
            return answer
        python_conversions.refuse_arrays(self.world, fn, args)
        python_conversions.check_printing(self.world, fn, (*args, *kwargs.values()))
        if not torch_call and writes_unasked(fn, args):
            self.heap.refuse("SFX104", f"{trace_rules.describe(fn)} writes into a NumPy array")
        if not torch_call and shows_copy(attribute_of(fn, "__name__", ""), *args, *kwargs.values()):
            self.heap.refuse("SFX104", f"{trace_rules.describe(fn)} of a NumPy array from outside")
        kind = fn if safe_isinstance(fn, type) else args[0] if fn is object.__new__ and args else None
        if safe_isinstance(kind, type) and deletes(kind) and not is_library(kind.__module__):
            self.heap.refuse("SFX104", f"makes a {trace_rules.describe(kind)}, whose class has __del__")
        if id(fn) in BARE:
            return self.guarded(fn, args, kwargs)
        self.reads.of_call(fn, args, kwargs)
        if torch_call:
            made = self._run_torch(fn, args, kwargs)
        else:
            answer = self._run_in_python(fn, args, kwargs)
            if answer is not ABSENT:
                return answer
            if takes_lengths(fn):
                args, kwargs = as_tensors(self.interp.call, args, kwargs)
            made = self.run_native(fn, args, kwargs)
        return self._noted(fn, args, kwargs, made, torch_call)

    def _check_registration(self, fn: Any, args: tuple[Any, ...]) -> None:
        """Notes the owner of a hook that C code is about to register."""
        if attribute_of(fn, "__name__", "") not in REGISTERS_HOOK:
            return
        if self.world.branching:
            self.heap.refuse("SFX111", "a branch of torch.cond registers a hook")
        owner = attribute_of(fn, "__self__", args[0] if args else None)
        self._watch_from_outside(fn.__name__, owner)
        self.world.hooked.add(owner if not safe_isinstance(owner, torch.Tensor) else owner.grad_fn)

    def makes_shown(self, fn: Any) -> bool:
        """Returns True for a class of tensors that have no ``__torch_dispatch__``."""
        if not safe_isinstance(fn, type) or not issubclass(fn, torch.Tensor) or fn in PLAIN_TENSORS:
            return False
        return not compat.is_wrapper_class(fn) and not issubclass(fn, torch.nn.parameter.UninitializedTensorMixin)

    def _check_made_class(self, fn: Any, args: tuple[Any, ...]) -> None:
        """Refuses to make tensors of a subclass."""
        if safe_isinstance(fn, type) or attribute_of(fn, "__name__", "") in MAKES_SUBCLASS:
            for made in (fn, *args):
                if safe_isinstance(made, type) and issubclass(made, torch.Tensor) and made not in PLAIN_TENSORS:
                    self.heap.refuse("SFX109", f"makes a {made.__qualname__}, a tensor subclass")

    def _read_value(self, fn: Any, args: tuple[Any, ...]) -> Any:
        """Answers methods of tensors that read values, where those are known; refuses others that need values."""
        name = attribute_of(fn, "__name__", "")
        if name not in READS_VALUE:
            if name in trace_rules.VALUE_METHODS:
                needs = "needs values that exist only when the graph runs"
                self.heap.refuse("SFX106", f"{trace_rules.describe(fn)} {needs}")
            return ABSENT
        owner = attribute_of(fn, "__self__")
        owner = owner if safe_isinstance(owner, torch.Tensor) else args[0] if args else None
        known = constant_value(self.tracer, owner) if safe_isinstance(owner, torch.Tensor) else None
        if known is not None:
            return getattr(known, fn.__name__)()
        number = host_value(self.world, owner)
        if name == "tolist":
            return self._listed(owner, number)
        return number if number is not None and name == "item" else ABSENT

    def _listed(self, tensor: torch.Tensor, number: Any) -> Any:
        """Returns ``tensor.tolist()`` of a few numbers; refuses others."""
        sizes = tuple(tensor.shape)
        if number is not None:
            return number if not sizes else functools.reduce(lambda made, _: [made], sizes, number)
        drawn = self.world.random_draws.of_torch.listed(tensor)
        if drawn is not None:
            return drawn
        known = self.world.host_reads.listed(tensor)
        if known is not None:
            return _nested(iter(known), sizes)
        small = all(type(size) is int for size in sizes) and tensor.numel() <= _MOST_LISTED
        numbers = tensor.is_floating_point() or tensor.dtype is torch.int64
        if not (small and numbers and self.world.specialization.lists_numbers):
            self.world.random_draws.of_torch.want((tensor,))
            self.world.host_reads.want((tensor,))
            self.heap.refuse("SFX106", "Tensor.tolist needs values that exist only when the graph runs")
        self.world.listed = True
        return self._items(tensor.detach())  # eager's call makes no node of autograd

    def _items(self, tensor: torch.Tensor) -> Any:
        if not tensor.dim():
            return self.guarded(torch.Tensor.item, (tensor,), {})
        return [self._items(tensor[index]) for index in range(len(tensor))]

    def _on_containers(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """Prepares a call that is none of torch's: brings in its object and refuses what changes things outside.

        Returns:
            The result, or :data:`ABSENT` if the call is still to be run; and the arguments to run it with.
        """
        owner = attribute_of(fn, "__self__")
        if self.world.reads.listening:
            self.world.reads.containers((owner, *args))
        if (fn is setattr or fn is delattr) and args and issubclass(type(args[0]), (type, types.ModuleType)):
            self.heap.refuse("SFX111", f"changes an attribute of {trace_rules.describe(args[0])} by C code")
        if fn is functools._lru_cache_wrapper:
            return caches.make(self.world, args, kwargs), args
        if type(owner) is functools._lru_cache_wrapper:
            caches.check_method(self.world, owner, fn.__name__)
        if id(fn) not in BARE and (type(owner) not in CONTAINERS or fn.__name__ not in STORING_METHODS):
            self.reads.refuse_unshadowed(fn, (*args, *kwargs.values()))
        args = self.reads.hashed(fn, owner, args)
        if self.reads.stores_only(fn, owner, args):
            return self.guarded(fn, args, kwargs), args
        self.reads.fill_owner(fn, args)
        if safe_isinstance(owner, BUFFERS) and self.heap.record_of(owner) is None:
            return self.guarded(fn, args, kwargs), args
        bare = safe_isinstance(fn, type) and id(fn.__new__) in BARE
        if not trace_rules.is_pure(fn) and not bare and callable(fn):
            self.refuse_call(fn)
        return ABSENT, args

    def _run_in_python(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers functions of symbolic numbers, and runs C code that calls methods written in Python."""
        if not safe_isinstance(fn, type) and id(fn) not in builtin_methods.ARITHMETIC:
            substitute = number_calls.number_function(self.world, fn, args, kwargs)
            if substitute is not ABSENT:
                return substitute
            stores = fn is operator.setitem and type(args[0]) in CONTAINERS
            read = args[:2] if stores else args
            for value in read:
                if issubclass(type(value), LimitedShadow):
                    value.refuse(self.heap)
            if any(safe_isinstance(value, DeferredValue) for value in read):
                what = f"{trace_rules.describe(fn)} of a value that is known only after the step"
                self.heap.refuse("SFX106", what)
        owner = attribute_of(fn, "__self__")
        calls = (
            any(fn is known for known in _CALLS_METHODS)
            or any(type(value) in _READS_THROUGH for value in (owner, *args))
            or (attribute_of(fn, "__name__", "") in _CALLS_METHODS_BY_NAME and not _looks_up_key(fn, args))
            or (type(owner) in _TEXTS and fn.__name__ != "join")
        )
        if calls or not keeps_callables(fn) or asks_missing(fn, args):
            objects = self.world.reentry.objects(fn, (owner, *args, *kwargs.values()))
            if objects and wants_values(fn, args):
                args, kwargs = concrete_numbers.concrete_within((args, kwargs))
                with self.world.reentry.around(self.world.reentry.objects(fn, (owner, *args, *kwargs.values()))):
                    return self._run_on_values(fn, args, kwargs)
            if objects:
                with self.world.reentry.around(objects):
                    return self.guarded(fn, args, kwargs)
        return ABSENT

    def _run_torch(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch.

        Some of its composite operators do not write ``out`` if tensors are not plain.
        """
        for value in args:
            if issubclass(type(value), LimitedShadow):
                value.refuse(self.heap)
        into = kwargs.get("out")
        memory = self.heap.memory
        before = memory.mark(into) if safe_isinstance(into, torch.Tensor) else (0, 0)
        if takes_lengths(fn):
            args, kwargs = as_tensors(self.interp.call, args, kwargs)
        made = self.guarded(fn, args, kwargs)
        others = type(fn) in compat.OPERATORS and not compat.is_torchs(fn)  # they take no call without it
        if safe_isinstance(into, torch.Tensor) and memory.only_resized(into, before) and not others:
            return into.copy_(self.guarded(fn, args, {name: v for name, v in kwargs.items() if name != "out"}))
        return made

    def _noted(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, torch_call: bool) -> Any:
        """Returns the result of C code, after what guards need to know of it is recorded."""
        if type(made) is torch.utils.hooks.RemovableHandle and self.world.specialization.native_backward:
            node = attribute_of(fn, "__self__")
            if safe_isinstance(node, torch.autograd.graph.Node) and args:
                self.world.custom_functions.hook(node, fn.__name__, args[0], made)
        if safe_isinstance(made, STANDING):
            self._note_made(fn, args, made)
        if type(made) is np.ndarray and computes_arrays(fn):
            self.world.random_draws.note_made(made)
        if type(fn) in _ASKS:
            made = self.world.queries.note(fn, args, kwargs, made)
            for ask, given in compat.settings_of(fn):
                self.world.queries.note(ask, given, {}, ask(*given))
        if not torch_call and type(fn) in HASHABLE:
            self.heap.definitions.asked(fn, args, made, self.world.new_classes.keys())
        return made

    def _note_made(self, fn: Any, args: tuple[Any, ...], made: Any) -> None:
        """Records an object of a class in :data:`STANDING` that C code has created."""
        if not safe_isinstance(fn, type) and attribute_of(fn, "__name__") not in _MAKES_DESCRIPTOR:
            return
        if type(made) is types.CellType:
            self.world.new_cells[id(made)] = made
        elif safe_isinstance(made, types.ModuleType):
            self.world.new_modules[id(made)] = made
            self.world.own_namespaces[id(vars(made))] = vars(made)
        elif type(made) is types.FunctionType:
            self.world.new_functions[id(made)] = made
            self.world.run_in(made.__globals__)
        else:
            self.world.new_descriptors[id(made)] = made

    def _watch_from_outside(self, name: str, owner: Any) -> None:
        """Handles ``retain_grad`` and hooks on an outside autograd graph: a backward after this graph runs them."""
        if name == "retain_grad" and any(record.shadow is owner for record in self.heap.outside_nodes.values()):
            self.world.defer(torch.Tensor.retain_grad, (owner,), {})
        elif id(owner) in self.heap.outside_nodes:
            self.heap.refuse("SFX111", "registers a hook in an autograd graph from before the step")

    def run_native(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs C code; passes the values of symbolic numbers if it accepts only Python's own."""
        if wants_values(fn, args):
            return self._on_copies(self._run_on_values, fn, args, kwargs)
        try:
            return self.guarded(fn, args, kwargs)
        except (TypeError, RuntimeError) as error:
            if safe_isinstance(error, RuntimeError) and "but got Sym" not in str(error):  # of torch's own parsers
                raise
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            deeper = frames[-1].f_code is not cpp_warnings.call.__code__  # the error is of Python code that it called
            given = list(inside((args, kwargs)))
            if (
                deeper
                or any(map(callable, given))
                or not any(safe_isinstance(value, compat.SYMBOLS) for value in given)
            ):
                raise
        self.world.last_error = None
        return self._on_copies(self.guarded, fn, args, kwargs)

    def _on_copies(
        self, run: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs C code on values of the symbolic numbers, for which containers are copied; refuses if it changes one."""
        values, by_name = concrete_numbers.concrete_within((args, kwargs))
        pairs = zip((*args, *kwargs.values()), (*values, *by_name.values()), strict=True)
        copies = [copy for given, copy in pairs if copy is not given and safe_isinstance(copy, (list, deque))]
        before = [_items(copy) for copy in copies]
        made = run(fn, values, by_name)
        for copy, old in zip(copies, before, strict=True):
            new = _items(copy)
            if len(new) != len(old) or not all(map(operator.is_, new, old)):
                self.heap.refuse("SFX111", f"{trace_rules.describe(fn)} changes a list of numbers that may change")
        return made

    def _run_on_values(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs C code that gets values of the symbolic numbers that methods and callbacks return to it."""
        python_conversions.refuse_to_numpy(self.world, fn, (*args, *kwargs.values()))
        outer, self.world.answers_values = self.world.answers_values, True
        try:
            return self.guarded(fn, args, kwargs)
        finally:
            self.world.answers_values = outer

    def refuse_call(self, fn: Any) -> None:
        owner = attribute_of(fn, "__self__")
        if safe_isinstance(owner, torch.Generator):
            self.heap.refuse("SFX110", f"calls torch.Generator.{fn.__name__}")
        self.heap.refuse("SFX103", f"calls {trace_rules.describe(fn)}, which may have effects outside the step")
