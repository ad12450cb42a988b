"""Protocols of the shadow table for the kinds of shadows.

All files of this package are below ``shadow_table.py``, which creates shadows of all kinds. A record is ``Any`` here,
since ``records.py`` itself is typed against the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.recorder import GuardRecorder
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.recording.tracer import GraphTracer

Number = int | float | np.int64
"""A number from outside that may be symbolic; a ``np.float64`` is a float."""


class DefinitionRecorder(Protocol):
    """Records the definitions read from modules and classes."""

    def took(self, space: Any, name: str, value: Any) -> None: ...


class IdentityRecorder(Protocol):
    """Records the objects that were distinguished by identity."""

    def pin_key(self, key: Any) -> None: ...

    def separated(self) -> list[Guard]: ...


class NumberRecorder(Protocol):
    """Records the numbers from outside; ``OutsideNumbers`` documents each member."""

    inputs: list[tuple[Any, Source, Number]]

    def length(self, real: Number, source: Source) -> Any: ...

    def number_of(self, value: Any) -> Any: ...

    def found(self, number: Any) -> tuple[Source, Number] | None: ...


class StorageRecorder(Protocol):
    """Records the tensors whose storage was replaced."""

    def replaced(self) -> tuple[Any, ...]: ...


class ShadowTableAPI(GuardRecorder, ABC):
    """The shadow table's interface to its parts; ``ShadowTable`` documents each member."""

    tracer: GraphTracer
    specialization: Specialization
    is_part: bool
    by_real: dict[int, Any]
    by_shadow: dict[int, Any]
    in_memory: dict[int, list[Any]]
    outside_nodes: dict[int, Any]
    leaves: list[Any]
    accumulators: list[Any]
    sizes: list[tuple[Any, Source]]
    numbers: NumberRecorder
    written_names: Callable[[], Iterable[str]]
    symbolic_roots: set[int]
    static_roots: set[int]
    host_roots: set[int]
    fixed_roots: set[int]
    ragged: dict[int, Any]
    ragged_dims: dict[int, int]
    dtensor_rules: tuple[Any, ...]
    watched: dict[int, str]
    cells: dict[int, Any]
    namespaces: dict[int, Any]
    new_namespaces: dict[int, tuple[dict[str, Any], Any]]
    dropped: Callable[[str], None]
    decides: Callable[[], None]
    reenter: Callable[[Any], Any]
    definitions: DefinitionRecorder
    identities: IdentityRecorder
    memory: StorageRecorder
    unknown_iterators: set[str]
    shown: Any

    @abstractmethod
    def shadow(self, real: Any, source: Source, name: str = "") -> Any: ...

    @abstractmethod
    def register(self, record: Any) -> Any: ...

    @abstractmethod
    def record_of(self, shadow: Any) -> Any: ...

    @abstractmethod
    def dict_record(self, shadow: Any) -> Any: ...

    @abstractmethod
    def bind(self, real: Any, source: Source) -> Source: ...

    @abstractmethod
    def real_key(self, key: Any) -> Any: ...

    @abstractmethod
    def shadow_key(self, real_key: Any, base: Source, position: int) -> Any: ...

    @abstractmethod
    def ragged_size(self, fake: Any) -> Any: ...

    @abstractmethod
    def trusts(self, namespace: dict[str, Any]) -> bool: ...

    @abstractmethod
    def below(self, source: Source | None, roots: set[int]) -> bool: ...

    @abstractmethod
    def read_grad(self, fake: Any) -> None: ...

    def entry_grad(self, fake: Any) -> Any: ...
