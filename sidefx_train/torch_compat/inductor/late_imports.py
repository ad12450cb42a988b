"""Delays Inductor's imports of modules and templates that a CPU needs late or never."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sidefx_train.torch_compat.inductor.patching import replaced


class _LateTemplate:
    """A Jinja template that is read when it is first used; those of Triton kernels never are on a CPU."""

    def __init__(self, read: Callable[[str], Any], source: str) -> None:
        self._made = functools.cache(functools.partial(read, source))

    def __bool__(self) -> bool:
        return bool(self._made())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)


def _import_lowering() -> None:
    """Imports Inductor, which reads two dozen templates of kernels for devices other than the CPU."""
    if "torch._inductor.lowering" in sys.modules:
        return
    from torch._inductor.codegen.common import KernelTemplate

    read = vars(KernelTemplate).get("_template_from_string")
    if type(read) is not staticmethod:  # this torch reads them differently
        importlib.import_module("torch._inductor.lowering")
        return
    late = functools.partial(_LateTemplate, KernelTemplate._template_from_string)
    KernelTemplate._template_from_string = staticmethod(late)
    try:
        with _late_import("networkx"), _listing_operators_once():
            importlib.import_module("torch._inductor.lowering")
            importlib.import_module("torch._inductor.compile_fx")
    finally:
        KernelTemplate._template_from_string = read


@contextmanager
def _listing_operators_once() -> Iterator[None]:
    """Context that lists the operators of each namespace once; none is defined inside."""
    from torch._export import utils

    with (
        replaced(utils, "_materialize_cpp_cia_ops", functools.cache),
        replaced(utils, "_collect_all_valid_cia_ops_for_namespace", functools.cache),
    ):
        yield


class _LateModule(types.ModuleType):
    """Replaces a module in its importers; imports it when an attribute is used."""

    importing = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.importing:  # for an annotation
            return Any
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _late_import(name: str) -> Iterator[None]:
    """Context in which imports of a module are delayed until it is used."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = late = _LateModule(name)
    try:
        yield
    finally:
        late.importing = False
        if sys.modules.get(name) is late:
            del sys.modules[name]
