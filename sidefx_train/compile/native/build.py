"""Builds and loads the native module, once per machine, beside Inductor's own compilation.

Where no compiler is found, or the build fails, :func:`native_module` returns ``None`` and torch's operators are used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from sidefx_train import _torch_compat as compat
from sidefx_train import cache
from sidefx_train.compile.native import guards, products, tensors, updates

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
_HEAD = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cmath>
#include <cstdint>
#include <omp.h>
#include <vector>
"""

_TABLE = """
static PyMethodDef methods[] = {
    {"adam", (PyCFunction)(void (*)(void))adam, METH_FASTCALL, nullptr},
    {"sgd", (PyCFunction)(void (*)(void))sgd, METH_FASTCALL, nullptr},
    {"bad_index", (PyCFunction)(void (*)(void))bad_index, METH_FASTCALL, nullptr},
    {"product", (PyCFunction)(void (*)(void))product, METH_FASTCALL, nullptr},
    {"product_function", product_function, METH_NOARGS, nullptr},
    {"data_ptr_function", data_ptr_function, METH_O, nullptr},
    {"find_tensor_words", (PyCFunction)(void (*)(void))find_tensor_words, METH_FASTCALL, nullptr},
    {"tensors_readable", tensors_readable, METH_NOARGS, nullptr},
    {"guard_program", guard_program, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "sidefx_native", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_sidefx_native(void) { return PyModule_Create(&module); }
"""

SOURCE = "".join([_HEAD, updates.SOURCE, products.SOURCE, tensors.SOURCE, guards.SOURCE, _TABLE])
"""Little is included, so it compiles in about two seconds."""

_lock = threading.Lock()
_loaded = threading.Event()


def start_build() -> None:
    """Builds the module in the background if it is not there yet."""
    threading.Thread(target=native_module, name="sidefx-native", daemon=True).start()


def native_ready() -> bool:
    """True if :func:`native_module` does not wait for a compiler; else the module is being built from now on."""
    if not _loaded.is_set():
        start_build()
    return _loaded.is_set()


def native_module() -> ModuleType | None:
    """The module, built on first use; ``None`` if this machine cannot build it."""
    with _lock:
        try:
            return _load()
        finally:
            _loaded.set()


@lru_cache(maxsize=1)
def cpu_description() -> str:
    """A short name for this kind of CPU, for cache keys."""
    try:
        with open("/proc/cpuinfo") as info:
            text = "".join(sorted({line for line in info if line.startswith(("model name", "flags"))}))
    except OSError:
        text = platform.processor()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def _load() -> ModuleType | None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    address = compat.tensor_data_ptr_address()
    if compiler is None or address is None or not hasattr(os, "getuid"):
        return None
    key = hashlib.sha256(
        "\0".join([SOURCE, *_FLAGS, platform.python_version(), torch.__version__, cpu_description()]).encode()
    ).hexdigest()[:16]
    known = cache.load("native", key)
    library = cache.library(known["library"]) if known is not None else None
    if library is None:
        name = _compile(compiler)
        library = cache.library(name) if name is not None else None
        if library is None:
            return None
        cache.store("native", key, {"library": name}, "optimizer updates, products, guards, index checks")
    module = cache.load_module("sidefx_native", library)
    if module is None:
        return None
    module.data_ptr_function(address)
    _find_tensor_words(module)
    return module


def _find_tensor_words(module: ModuleType) -> None:
    """Shows the module a tensor with hooks, for it to see where they are."""
    probe = torch.zeros(1, requires_grad=True)
    probe.register_hook(_no_hook)
    probe.register_post_accumulate_grad_hook(_no_hook)
    hooks, late = compat.hooks_of(probe)
    module.find_tensor_words(probe, compat.tensor_impl_address(probe), hooks, late)


def _no_hook(_: torch.Tensor) -> None:
    return None


def _compile(compiler: str) -> str | None:
    """The name of the built library in the cache, ``None`` if it cannot be built."""
    with tempfile.TemporaryDirectory(prefix="sidefx_") as folder:
        source, built = Path(folder) / "native.cpp", Path(folder) / "native.so"
        source.write_text(SOURCE)
        command = [compiler, *_FLAGS, "-std=c++20", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}"]
        command += [str(source), "-o", str(built)]
        if subprocess.run([*command, *compat.c10_flags()], capture_output=True, check=False).returncode != 0:
            without = subprocess.run([*command, "-DSIDEFX_NO_C10"], capture_output=True, check=False)
            if without.returncode != 0:
                return None
        return cache.add_library(built)
