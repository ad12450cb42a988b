"""The capture's interface to everything below the world: side effects, native calls, symbols, interceptors."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.recording.tracer import GraphTracer
from sidefx_train.compile.capture.recording.write_log import WriteLog
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall
from sidefx_train.compile.capture.shadows.shadow_table import ShadowTable
from sidefx_train.errors import Location


class CaptureContext(ABC):
    """One capture; ``TraceWorld`` (``world/trace_world.py``) implements it and documents each member."""

    heap: ShadowTable
    tracer: GraphTracer
    interp: Interpreter
    specialization: Specialization
    writes: WriteLog
    deferred: list[DeferredCall]
    class_writes: dict[tuple[type, str], Any]
    class_snapshot: dict[tuple[type, str], Any]
    class_views: dict[int, tuple[Any, type]]
    module_namespaces: dict[int, dict[str, Any]]
    new_cells: dict[int, types.CellType]
    new_classes: dict[int, type]
    new_functions: dict[int, types.FunctionType]
    pending_state: list[tuple[Callable[[], None], Callable[[], None]]]
    freed: set[Any]
    warns: frozenset[types.CodeType]
    last_error: tuple[Exception, Any, Location | None] | None
    answers_values: bool
    branching: bool
    # Classes defined above this one, in world/native_calls.
    caches: Any
    context: Any
    reentry: Any
    random_draws: Any
    left_hooks: Any
    custom_functions: Any
    host_reads: Any
    computed_numbers: Any
    computed_objects: Any
    deferred_arrays: Any
    queries: Any
    reads: Any

    @abstractmethod
    def locate(self) -> Location | None: ...

    @abstractmethod
    def truth(self, value: Any) -> Any: ...

    @abstractmethod
    def touch(self, value: Any, deep: bool = True, asked: str = "") -> None: ...

    @abstractmethod
    def guarded(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def defer(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    @abstractmethod
    def freeze(self, value: Any) -> Any: ...

    @abstractmethod
    def changed_dtype(self) -> torch.dtype | None: ...

    @abstractmethod
    def as_key(self, key: Any) -> Any: ...

    @abstractmethod
    def own_key(self, key: Any, pin: bool = True) -> Any: ...

    @abstractmethod
    def unheard(self, error: BaseException) -> bool: ...

    @abstractmethod
    def imported(self, name: str, space: dict[str, Any], level: int) -> None: ...

    @abstractmethod
    def not_imported(self, error: ImportError, name: str) -> None: ...

    @abstractmethod
    def class_attr(self, cls: type, name: str) -> Any: ...

    @abstractmethod
    def class_entry(self, cls: type, name: str) -> Any: ...

    @abstractmethod
    def instance_attr(self, obj: Any, name: str) -> Any: ...

    @abstractmethod
    def set_instance_attr(self, obj: Any, name: str, value: Any) -> None: ...

    @abstractmethod
    def del_instance_attr(self, obj: Any, name: str) -> None: ...

    @abstractmethod
    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None: ...

    @abstractmethod
    def delete_global(self, namespace: dict[str, Any], name: str) -> bool: ...

    @abstractmethod
    def grant(self, condition: Any, holds: bool) -> bool: ...
