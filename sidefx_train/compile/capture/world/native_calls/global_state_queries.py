"""Queries of global state: C functions without arguments whose result the capture uses.

Such a result is a read of the outside world. It is guarded by calling the function again before every replay, unless
:data:`CONSTANT` says that it never changes in a process, or :data:`COVERED` that other guards cover it.
"""

from __future__ import annotations

import datetime
import functools
import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.query_guards import Asked, NotImportable, same_answer
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.plain_values import is_plain
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance
from sidefx_train.errors import Location

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.shadow_table import ShadowTable


CONSTANT = re.compile(
    r"_?(is_)?(has_|have_).*|is_built|is_available|is_acl_available|_is_.*_available|version|current_accelerator"
    r"|_?is_(compiling|dynamo_compiling|exporting|scripting|tracing|non_strict_tracing)"
    r"|_(jit|dispatch|functorch|cuda|xpu|mps|mtia|accelerator|log_api|c10d|rpc|dist)_.*"
    r"|_get_(accelerator|privateuse1_backend_name|cpp_backtrace|all_dtypes|dispatch_mode|max_operator_version)"
    r"|_get_(foreach|fused)_kernels_supported_devices|_get_graph_exec_group|_current_graph_task_id"
)
"""Names of functions with a constant result per process, or that answer like the interpreter during a capture."""
COVERED = re.compile(
    r"is_(grad|inference_mode)_enabled|is_autocast_.*|_?is_any_autocast_enabled|_?get_default_device"
    r"|get_default_dtype|get_num_threads|are_deterministic_algorithms_enabled|_get_deterministic_algorithms.*"
    r"|is_deterministic_algorithms_warn_only_enabled|_is_torch_function.*|_len_torch_(function|dispatch)_stack"
    r"|_get_torch_function_state|_get_tracing_state|get_deterministic_debug_mode|_get_current_function_mode_stack"
)
"""Names of functions whose result is guarded by every entry (``compat.GlobalState``)."""
_DOES = frozenset(
    {
        "push", "pop", "set", "enter", "exit", "clear", "increment", "decrement", "enable", "disable", "init", "add",
        "initialize", "remove", "reset", "start", "stop", "release", "begin", "end", "register", "free", "empty",
        "sync", "synchronize", "wait", "seed", "manual", "activate", "deactivate", "restore", "save", "record", "emit",
        "flush", "run", "finalize", "create", "make", "new", "warn", "throw", "raise", "load", "open", "close",
    }
)  # fmt: skip
"""Words in names of functions with effects: they are not called again as guards."""
_QUESTION = re.compile(r"_?(get|is|are|can|num|len|peek|current)(_|[A-Z]).*")
_STATE = re.compile(r".*_(enabled|allowed|precision|type)|_check_sparse_tensor_invariants|_only_lift_cpu_tensors")
_ANSWERS = (torch.dtype, torch.device, torch.layout, torch.memory_format, datetime.date, datetime.datetime)


class Queries:
    """The queries of one capture.

    Attributes:
        at_entry: answers, when the step was entered, of queries that a capture answers otherwise.
        now: what the step has made of them.
    """

    def __init__(self, heap: ShadowTable) -> None:
        self._heap = heap
        self._asked: dict[Any, tuple[Callable[[], Any], str, Location | None]] = {}
        self._failed: dict[str, tuple[NotImportable, Location | None]] = {}
        self._guards: list[Guard] | None = None
        self.at_entry = compat.answers_changed_by_captures()
        self.now = dict(self.at_entry)
        self._earlier: dict[Any, Any] = compat.autocast_dtypes()

    def note(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        """Records a call of a function if it is a query.

        Returns:
            The answer; eager's answer if a capture changes it.
        """
        if kwargs or not _is_question(fn, args) or not _is_answer(answer):
            return answer
        if fn in self.at_entry:
            answer = self.at_entry[fn]
        fn, args = compat.general_query(fn, args)
        key = (fn, args)
        if key not in self._asked:
            if not args and not same_answer(fn(), answer) and fn not in self.at_entry:
                self._heap.refuse("SFX103", f"calls {trace_rules.describe(fn)}, whose result differs at every call")
            ask = functools.partial(fn, *args) if args else fn
            shown = ", ".join(map(repr, args))
            self._asked[key] = (ask, f"{trace_rules.describe(fn)}({shown})", self._heap.locate())
            self._guards = None
        return answer

    def guard(self, ask: Callable[[], Any], shown: str) -> None:
        """Guards the answer of a function that C code asks, as it is before the step changes it.

        Args:
            ask: the function; called again at each call of the step.
            shown: how messages name it.
        """
        if (ask, ()) not in self._asked:
            self._asked[ask, ()] = (ask, shown, self._heap.locate())
            self._earlier[ask, ()] = ask()
            self._guards = None

    def subclasses(self, cls: type) -> list[type]:
        """Returns the direct subclasses of a class, which any code may add to."""
        ask: Callable[[], list[type]] = cls.__subclasses__
        self._asked[cls, "__subclasses__"] = (ask, f"{cls.__qualname__}.__subclasses__()", self._heap.locate())
        self._guards = None
        return ask()

    def failed_import(self, name: str) -> None:
        """Records that a module does not exist."""
        self._failed.setdefault(name, (NotImportable(name), self._heap.locate()))
        self._guards = None

    def guards(self) -> list[Guard]:
        """Returns one guard for each query; the state at the end of a capture is that at entry."""
        if self._guards is None:
            with compat.real_world():
                self._guards = [self._guard(key, *each) for key, each in self._asked.items()]
            sources = self._heap.sources
            for name, (missing, location) in self._failed.items():
                source = sources.slot(sources.const(missing, f"the missing module {name}"), "holds")
                self._guards.append(Guard("is", sources.call(source), True, location))
        return self._guards

    def _guard(self, key: Any, ask: Callable[[], Any], label: str, location: Location | None) -> Guard:
        sources = self._heap.sources
        if key in self._earlier:
            answer = self._earlier[key]
        else:
            answer = self.at_entry[ask] if ask in self.at_entry else ask()
        if is_plain(answer):
            return Guard("equal", sources.call(sources.const(ask, label.removesuffix("()"))), answer, location)
        source = sources.slot(sources.const(Asked(ask, answer), label), "holds")
        return Guard("is", sources.call(source), True, location)


def _is_question(fn: Any, args: tuple[Any, ...]) -> bool:
    name = attribute_of(fn, "__name__", "")
    if type(fn) is types.BuiltinFunctionType:
        owner = fn.__self__
        of_class = safe_isinstance(owner, type) and not args
        if owner is not None and not of_class and not safe_isinstance(owner, (types.ModuleType, compat.BINDING)):
            return False
        torch_call = trace_rules.is_torch_callable(fn)
    elif type(fn) is types.FunctionType and not args:  # of torch, called natively
        torch_call = True
    else:
        return False
    if CONSTANT.fullmatch(name) or COVERED.fullmatch(name) or str(fn.__module__).startswith("torch._C._functorch"):
        return False
    does = not _DOES.isdisjoint(name.lower().split("_"))
    if not torch_call:
        return not args and not does
    if not all(type(arg) in (str, int, bool, torch.dtype, torch.device) for arg in args):
        return False
    asks = not args and str(fn.__module__).startswith("torch.backends")
    return bool(_QUESTION.fullmatch(name)) or (not does and (asks or bool(_STATE.fullmatch(name))))


def _is_answer(answer: Any) -> bool:
    if type(answer) is dict:
        return all(map(_is_answer, (*answer, *answer.values())))
    if type(answer) in (list, tuple):
        return all(map(_is_answer, answer))
    return type(answer) in _ANSWERS or is_plain(answer)
