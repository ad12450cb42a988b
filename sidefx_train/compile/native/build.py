"""Builds and loads the native modules, once per machine, in parallel with the capture and Inductor's compilation.

There are six: matrix products, which are timed while a graph is lowered; scatter-add of rows, LSTM layers, and
attention, for graphs that contain them; the code around a graph (optimizer updates, index checks); and the guards,
whose torch headers take longer to read than everything else takes to compile. Nobody waits for the guards: Python
checks them until they are built, and with at most two processors they are built after the first graph. Of processes
that need the same module one builds it. If there is no compiler, or the build fails, there is no module, and torch's
operators and Python are used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import threading
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sidefx_train import disk_cache
from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.process_locks import made_once
from sidefx_train.compile.native import (
    attention_kernel,
    entry_holder,
    lstm_kernel,
    matmul_kernel,
    optimizer_updates,
    replay_memory,
    tensor_effects,
    warning_hook,
)
from sidefx_train.compile.native import scatter_add_kernel as rows
from sidefx_train.compile.native.guards import guard_program, tensor_impl, value_tests
from sidefx_train.compile.native.python_abi import PYTHON_HEADER, python_header

_FLAGS = ("-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")

_ENTRY = """
static PyMethodDef methods[] = {
    @METHODS@
    {nullptr, nullptr, 0, nullptr}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "@NAME@", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_@NAME@(void) { return PyModule_Create(&module); }
"""

_FAST = '{"@NAME@", (PyCFunction)(void (*)(void))@NAME@, METH_FASTCALL, nullptr},'


@dataclass
class _Module:
    """A native module: its source, and the loaded module.

    Attributes:
        name: its name in Python.
        text: C++ of its functions.
        fast: functions that take an array of arguments.
        others: entries of the other functions in the method table.
        label: description of its contents.
        reads_tensors: it includes torch's header of a tensor if available.
        level: optimization level.
        failure: why it could not be built.
    """

    name: str
    text: str
    fast: tuple[str, ...]
    others: tuple[str, ...]
    label: str
    reads_tensors: bool = False
    level: str = "-O3"
    lock: Any = field(default_factory=threading.Lock)
    done: bool = False
    module: ModuleType | None = None
    failure: str = ""

    @property
    def source(self) -> str:
        rows = [*(_FAST.replace("@NAME@", name) for name in self.fast), *self.others]
        head = PYTHON_HEADER if self.reads_tensors else python_header()
        return f"{head}#include <omp.h>\n{self.text}" + _ENTRY.replace("@METHODS@", "\n    ".join(rows)).replace(
            "@NAME@", self.name
        )

    def get(self) -> ModuleType | None:
        """Returns the module; waits while it is being built."""
        with self.lock:
            if not self.done:
                try:
                    self.module = _load(self)
                finally:
                    self.done = True
            return self.module


_FUNCTION = ('{"function", function, METH_NOARGS, nullptr},',)
_PRODUCTS = _Module("sidefx_products", matmul_kernel.SOURCE, ("product",), _FUNCTION, "products")
_ROWS = _Module("sidefx_rows", rows.SOURCE, ("sum_rows",), _FUNCTION, "scatter-adds of rows")
_LSTM = _Module("sidefx_lstm", lstm_kernel.SOURCE, ("layer",), _FUNCTION, "layers of an LSTM", level="-O2")
_ATTENTION = _Module("sidefx_attention", attention_kernel.SOURCE, ("attend",), _FUNCTION, "attention", level="-O2")
_AROUND = _Module(
    "sidefx_native",
    optimizer_updates.SOURCE,
    ("adam", "sgd", "bad_index"),
    ('{"data_ptr_function", data_ptr_function, METH_O, nullptr},',),
    "optimizer updates, index checks",
)
_OF_GUARDS = (tensor_impl, value_tests, guard_program, entry_holder, warning_hook, replay_memory, tensor_effects)
_GUARDS = _Module(
    "sidefx_guards",
    "".join(each.SOURCE for each in _OF_GUARDS),
    (
        "find_tensor_words",
        "entry_holder",
        "are_at",
        "are_unshared",
        "uses_of",
        "set_gradients",
        "set_versions",
        "increment_versions",
    ),
    (
        '{"tensors_readable", tensors_readable, METH_NOARGS, nullptr},',
        '{"guard_program", guard_program, METH_O, nullptr},',
        '{"let_through", let_through, METH_O, nullptr},',
        '{"observe_warnings", observe_warnings, METH_O, nullptr},',
    ),
    "guards, holders of entries, hook of warnings, memory of replays, gradients and versions",
    reads_tensors=True,
)


_MODULES = (_PRODUCTS, _ROWS, _LSTM, _ATTENTION, _AROUND, _GUARDS)

_builders: dict[str, threading.Thread] = {}


def start_build(with_rows: bool = False, with_lstm: bool = False, with_attention: bool = False) -> None:
    """Starts building missing modules in the background.

    With at most two processors, one of which the capture uses, the guards are delayed, and the others are built in the
    order in which they are needed.

    Args:
        with_rows: a graph has a scatter-add of rows.
        with_lstm: a graph has LSTM layers.
        with_attention: a graph has attention.
    """
    if (os.cpu_count() or 1) > 2:
        for module in (_PRODUCTS, _AROUND, _GUARDS):
            _start(module)
    else:
        _start(_PRODUCTS, _AROUND)
    if with_rows:
        _start(_ROWS)
    if with_lstm:
        _start(_LSTM)
    if with_attention:
        _start(_ATTENTION)


def _start(*modules: _Module) -> None:
    missing = [module for module in modules if not module.done]
    builder = _builders.get(modules[0].name)
    if not missing or (builder is not None and builder.is_alive()):
        return
    builder = threading.Thread(target=lambda: [module.get() for module in missing], name="sidefx-native", daemon=True)
    _builders[modules[0].name] = builder
    builder.start()


def native_ready() -> bool:
    """Returns True if the modules for graphs are built; otherwise starts building them."""
    ready = _PRODUCTS.done and _AROUND.done
    if not ready:
        start_build()
    return ready


def guards_ready() -> bool:
    """Returns True if the guards are built; otherwise starts building them."""
    if not _GUARDS.done and _GUARDS.name not in _builders:
        if _is_stored(_GUARDS):
            _GUARDS.get()
        else:
            _start(_GUARDS)
    return _GUARDS.done


def guards_if_stored() -> ModuleType | None:
    """Returns the guards if they are built, in this process or an earlier one; ``None`` otherwise."""
    return _GUARDS.get() if _GUARDS.done or _guards_are_stored() else None


def guards_if_done() -> ModuleType | None:
    """Returns the guards if they are loaded in this process; ``None`` otherwise."""
    return _GUARDS.module


@cache
def _guards_are_stored() -> bool:
    return _is_stored(_GUARDS)


def products_module() -> ModuleType | None:
    """Returns matrix products, built on first use; ``None`` if this machine cannot build them."""
    return _PRODUCTS.get()


def rows_module() -> ModuleType | None:
    """Returns the scatter-add of rows, built on first use; ``None`` if this machine cannot build it."""
    return _ROWS.get()


def lstm_module() -> ModuleType | None:
    """Returns LSTM layers, built on first use; ``None`` if this machine cannot build them."""
    return _LSTM.get()


def attention_module() -> ModuleType | None:
    """Returns attention, built on first use; ``None`` if this machine cannot build it."""
    return _ATTENTION.get()


def native_module() -> ModuleType | None:
    """Returns the code around graphs, built on first use; ``None`` if this machine cannot build it."""
    return _AROUND.get()


def build_all() -> dict[str, str]:
    """Builds every module that is missing, in up to a minute.

    Returns:
        Why a module could not be built, by its label; ``""`` for one that is built.
    """
    return {
        module.label: "" if module.get() is not None else module.failure or "its library cannot be loaded"
        for module in _MODULES
    }


def guards_module() -> ModuleType | None:
    """Returns the guards, built on first use; ``None`` if this machine cannot build them."""
    return _GUARDS.get()


def _new_locks() -> None:
    _builders.clear()
    for module in _MODULES:
        module.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)  # the builder does not exist in the child


@lru_cache(maxsize=1)
def cpu_description() -> str:
    """Returns a short name of this kind of CPU, for cache keys."""
    try:
        with open("/proc/cpuinfo") as info:
            text = "".join(sorted({line for line in info if line.startswith(("model name", "flags"))}))
    except OSError:
        text = platform.processor()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _key(wanted: _Module) -> str:
    parts = [wanted.source, wanted.level, *_FLAGS, platform.python_version(), compat.torch_build(), cpu_description()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_stored(wanted: _Module) -> bool:
    return disk_cache.load("native", _key(wanted), machine=True) is not None


def _stored(key: str) -> Path | None:
    known = disk_cache.load("native", key, machine=True)
    return disk_cache.library(known["library"], machine=True) if known is not None else None


def _load(wanted: _Module) -> ModuleType | None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    address = compat.tensor_data_ptr_address()
    if compiler is None or address is None or not hasattr(os, "getuid"):
        wanted.failure = "no C++ compiler" if compiler is None else "unknown layout of tensors, or operating system"
        return None
    key = _key(wanted)
    with made_once(disk_cache.machine_dir(), key, lambda: _stored(key) is not None):
        library = _stored(key)
        if library is None:
            name = _compile(compiler, wanted)
            library = disk_cache.library(name, machine=True) if name is not None else None
            if library is None:
                return None
            disk_cache.store("native", key, {"library": name}, wanted.label, machine=True)
    module = disk_cache.load_module(wanted.name, library)
    if module is None:
        return None
    if wanted.reads_tensors:
        _find_tensor_words(module)
    elif wanted is _AROUND:
        module.data_ptr_function(address)
    return module


def _find_tensor_words(module: ModuleType) -> None:
    """Passes the module a tensor with hooks, so that it finds their location in memory. A capture may be running."""
    with compat.outside_tracing():
        probe = torch.zeros(1, requires_grad=True)
        probe.register_hook(_no_hook)
        probe.register_post_accumulate_grad_hook(_no_hook)
        hooks, late = compat.hooks_of(probe)
        module.find_tensor_words(probe, compat.tensor_impl_address(probe), hooks, late)


def _no_hook(_: torch.Tensor) -> None:
    return None


def _compile(compiler: str, wanted: _Module) -> str | None:
    """Builds a library and returns its name in the cache, ``None`` on failure."""
    with disk_cache.scratch_folder() as folder:
        source, built = folder / "native.cpp", folder / "native.so"
        source.write_text(wanted.source)
        patient = ["nice"] if wanted is _GUARDS and shutil.which("nice") else []
        command = [
            *patient,
            compiler,
            wanted.level,
            *_FLAGS,
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{sysconfig.get_paths()['include']}",
        ]
        command += [str(source), "-o", str(built)]
        ways = [compat.c10_flags(), ["-DSIDEFX_NO_C10"]] if wanted.reads_tensors else [[]]
        for way in ways:
            try:
                done = subprocess.run([*command, *way], capture_output=True, check=False, text=True)
            except OSError as error:  # $CXX names no program
                wanted.failure = f"{compiler}: {error.strerror}"
                return None
            if done.returncode == 0:
                wanted.failure = ""
                return disk_cache.add_library(built, machine=True)
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            wanted.failure = errors[0] if errors else f"{compiler} returned {done.returncode}"
    return None
