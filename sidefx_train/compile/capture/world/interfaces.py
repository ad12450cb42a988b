"""What the collaborators of the capturing world ask of it."""

from __future__ import annotations

import types
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.compile.capture.shadows.capture_context import CaptureContext
from sidefx_train.compile.capture.world.backward_reads import Reads
from sidefx_train.compile.capture.world.native_calls import contextvars_and_locks
from sidefx_train.compile.capture.world.native_calls.dunder_reentry import Reentry
from sidefx_train.compile.capture.world.native_calls.global_state_queries import Queries
from sidefx_train.compile.capture.world.native_calls.lru_cache import Caches
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.errors import Location


class CaptureWorldAPI(CaptureContext):
    """One capture as its collaborators see it; ``TraceWorld`` (``trace_world.py``) documents each attribute."""

    caches: Caches
    context: contextvars_and_locks.ContextVariables
    locks: contextvars_and_locks.Locks
    queries: Queries
    random_draws: Any  # `RandomDraws`, whose files import this one
    reads: Reads
    reentry: Reentry
    native_generators: list[types.GeneratorType[Any, Any, Any]]
    answers_values: bool
    assumptions: dict[Location, None]
    listed: bool
    array_functions: set[types.CodeType]
    hooked: set[Any]
    mutated_after_graph: dict[int, str]
    tagged: dict[int, tuple[torch.Tensor, dict[str, None]]]
    own_namespaces: dict[int, dict[str, Any]]
    new_descriptors: dict[int, Any]
    new_modules: dict[int, types.ModuleType]
    class_namespaces: dict[type, Any]
    method_interceptors: dict[str, list[tuple[type, registry.Interceptor]]]
    attribute_hooks: dict[str, list[tuple[type, registry.AttributeHook]]]

    # The collaborators themselves, for what they ask of one another.
    callbacks: Any
    calls: Any
    modes: Any
    functions: Any
    keys: Any
    operators: Any
    variables: Any

    @abstractmethod
    def grant(self, condition: Any, holds: bool) -> bool: ...

    @abstractmethod
    def grant_finite(self, number: Any, *, infinite: bool, nan: bool) -> bool: ...

    @abstractmethod
    def native_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def type_of(self, obj: Any) -> type: ...

    @abstractmethod
    def override_getattr(self, obj: Any, name: str) -> Any: ...

    @abstractmethod
    def override_setattr(self, obj: Any, name: str, value: Any) -> bool: ...

    @abstractmethod
    def run_in(self, space: dict[str, Any]) -> None: ...

    @abstractmethod
    def globals_dict(self, space: dict[str, Any]) -> dict[str, Any]: ...

    @abstractmethod
    def wrapped_text(self, method: str, value: Any) -> Any: ...
