"""Builds a library from the C++ that Inductor generates for a graph.

The wrapper that calls the kernels is long and not worth optimizing; the kernels are short and are. Built as one unit at
the highest level, as Inductor does it, the wrapper takes most of the time. Here they are separate units, compiled in
parallel, both without torch's headers where possible (``wrapper_prelude.py``, ``simd_source.py``), the kernels in parts
that start while the graph is still being lowered (``kernel_units.py``). For kernels that need torch's header it is
precompiled once per machine, after the first such graph, since that takes three times as long as reading the plain one.
A library is cached under a hash of its sources, so equal graphs are built once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sidefx_train import disk_cache
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen.compile_queue import BuildFailed, CompileQueue, Unit
from sidefx_train.compile.backend.cpp_codegen.kernel_prelude import HEADER
from sidefx_train.compile.backend.cpp_codegen.kernel_units import Kernels
from sidefx_train.compile.backend.cpp_codegen.python_entry import ENTRY, OUTPUTS, dispatched_calls, kernels_called
from sidefx_train.compile.backend.cpp_codegen.wrapper_prelude import header_free_wrapper
from sidefx_train.compile.common.process_locks import claim
from sidefx_train.compile.native import attention_module, lstm_module, products_module, rows_module
from sidefx_train.compile.native.python_abi import python_header
from sidefx_train.switches import enabled


class Building:
    """A library whose sources are still being written.

    The Python entry point is compiled from the start, kernels as they arrive. Used as a context: unfinished compilers
    are stopped at its end.
    """

    def __init__(self) -> None:
        self.queue = CompileQueue()
        self.quick, self.thorough = compat.cpp_command(quick=True), compat.cpp_command(quick=False)
        self.gnu = _is_gnu(self.quick[0])
        self.kernels = Kernels(self.queue, self.thorough, self.gnu and enabled("header_free_kernels"))
        self.header_free_quick = tuple("-Og" if flag == "-O1" else flag for flag in self.quick)
        self.entry = Unit(python_header() + ENTRY, self.header_free_quick, header_free=self.gnu)

    def __enter__(self) -> Building:
        return self

    def begin(self) -> None:
        """Starts compiling what is the same for all graphs."""
        self.queue.compile(self.entry)
        if self.gnu:
            self.queue.run(*_substitute(self.quick[0], self.queue.folder))

    def __exit__(self, *_: object) -> None:
        self.queue.close()

    def add(self, kernel: str) -> None:
        """Adds a kernel, with the include of its header, that will be among the library's."""
        self.kernels.add(kernel)


def build_library(
    caller: str,
    kernels: str,
    outputs: int,
    libraries: Sequence[str] = (),
    while_compiling: Callable[[], None] = lambda: None,
    building: Building | None = None,
) -> str:
    """Builds and caches a library; equal sources are built once.

    Args:
        caller: source of ``inductor_entry_impl``.
        kernels: source of the kernels it calls.
        outputs: how many tensors it returns.
        libraries: further files to link.
        while_compiling: called while the compiler runs.
        building: has started compiling kernels; it ends here.

    Returns:
        The library's name in the cache.

    Raises:
        BuildFailed: it does not compile, or cannot be cached.
    """
    with building or Building() as at:
        include = f"#include <{compat.WRAPPER_HEADER}>"
        plain = caller.replace(include, "")
        called = kernels_called(caller) + dispatched_calls(caller)
        behind = OUTPUTS.replace("@OUTPUTS@", str(outputs))
        whole = Unit(f"{include}\n{called}{plain}{behind}", tuple(at.quick))
        wanted = enabled("header_free_wrapper") and caller.count(include) == 1
        header_free = header_free_wrapper(f"{called}{plain}{behind}") if wanted else None
        if header_free is not None:
            units = [Unit(header_free, at.header_free_quick, header_free=at.gnu), at.entry, *at.kernels.units(kernels)]
            try:
                return _build(units, kernels, at.queue, libraries, while_compiling)
            except BuildFailed:  # it uses more than the header-free prelude has: torch's headers, or refused
                at.queue.close()
        units = [whole, at.entry, *Kernels(at.queue, at.thorough, header_free=False).units(kernels)]
        return _build(units, kernels, at.queue, libraries, while_compiling)


def _build(
    units: list[Unit], kernels: str, queue: CompileQueue, libraries: Sequence[str], while_compiling: Callable[[], None]
) -> str:
    """Compiles and links; the first unit is the wrapper, the second the Python entry point.

    How kernels are grouped in units depends on compile times, so the library's cache key is the kernels' source.
    """
    linked = compat.cpp_link_flags()
    compiler = units[0].command[0]
    header_free = all(unit.header_free for unit in units) and not libraries
    words = {word for unit in units for word in (*unit.command, str(unit.header_free))}
    texts = [unit.text for unit in units[:2]]
    key = _digest(compiler_version(compiler), *linked, *libraries, *sorted(words), *texts, HEADER, kernels)
    known = disk_cache.load("build", key)
    if known is not None and disk_cache.library(known["library"]) is not None:
        return str(known["library"])
    objects = []
    for unit in units:
        included = _precompiled(unit.command, unit.header) if unit.header is not None else None
        objects.append(str(queue.compile(unit, included)))
    if header_free:
        linked = [f"-L{queue.folder}", "-Wl,--no-as-needed", f"-l{compat.C_INTERFACE_LIBRARY}"]
        queue.run(*_substitute(compiler, queue.folder))
    queue.finish(while_compiling)
    built = queue.folder / "graph.so"
    queue.run([compiler, "-shared", "-fPIC", "-fopenmp", *objects, "-o", str(built), *linked, *libraries], built)
    queue.finish()
    name = disk_cache.add_library(built)
    if name is None:
        raise BuildFailed("the library cannot be kept")
    disk_cache.store("build", key, {"library": name}, f"{len(units) - 2} parts of kernels")
    for header in {unit.header for unit in units if unit.header is not None}:
        prepare_header(header)
    return name


def _substitute(compiler: str, folder: Path) -> tuple[list[str], Path]:
    """Creates an empty library with the name of torch's, which is loaded at run time anyway: reading all its symbols
    takes longer than linking."""
    name = f"lib{compat.C_INTERFACE_LIBRARY}.so"
    made = folder / name
    return [compiler, "-shared", f"-Wl,-soname,{name}", "-x", "c", os.devnull, "-o", str(made)], made


def load_library(name: str) -> Callable[[list[Any]], list[Any]] | None:
    """Returns the function in a library: from capsules of inputs to those of outputs.

    Returns ``None`` if the library, or a native module that it calls, is gone.
    """
    path = disk_cache.library(name)
    module = disk_cache.load_module("sidefx_graph", path) if path is not None else None
    if module is None:
        return None
    needs = (
        ("bind_product", products_module),
        ("bind_sum_rows", rows_module),
        ("bind_lstm", lstm_module),
        ("bind_attention", attention_module),
    )
    for name, native_module in needs:
        if hasattr(module, name):
            native = native_module()
            if native is None:
                return None
            getattr(module, name)(native.function())
    return module.call  # type: ignore[no-any-return]


def prepare_header(header: str) -> None:
    """Precompiles a header of kernels for later graphs, unless this machine has it already.

    A separate process does it, at low priority; it is not waited for and outlives this one. One does it at a time: it
    takes half a gigabyte of memory, and on a busy machine minutes. Inductor's setting for its own headers
    (``TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS``) disables it.
    """
    command = compat.cpp_command(quick=False)
    if not compat.precompiles_headers() or not _is_gnu(command[0]) or _precompiled(command, header) is not None:
        return
    with contextlib.suppress(OSError), claim(_header_folder(command, header).with_suffix(".lock")) as file:
        if file is None or _precompiled(command, header) is not None:
            return
        script = _precompiling(command, header)
        quiet, held = subprocess.DEVNULL, (file.fileno(),)
        subprocess.Popen(
            ["sh", "-c", script], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True, pass_fds=held
        )


def accepts_flags(flags: Sequence[str]) -> bool:
    """Returns True if the compiler accepts these flags."""
    return _accepts(compat.cpp_compiler(), tuple(flags))


@lru_cache(maxsize=32)
def _accepts(compiler: str, flags: tuple[str, ...]) -> bool:
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@lru_cache(maxsize=4)
def compiler_version(compiler: str) -> str:
    """Returns the version text of a compiler."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _is_gnu(compiler: str) -> bool:
    """Returns True for GCC: only it has the built-in functions of ``simd_source.py`` and accepts precompiled
    headers."""
    return "Free Software Foundation" in compiler_version(compiler)


def _header_folder(command: Sequence[str], header: str) -> Path:
    return (
        disk_cache.machine_dir()
        / "headers"
        / _digest(compiler_version(command[0]), compat.torch_build(), *command, header)
    )


def _precompiled(command: Sequence[str], header: str) -> Path | None:
    """Returns a header with a precompiled form next to it, if that exists."""
    path = _header_folder(command, header) / "header.h"
    if not path.with_suffix(".h.gch").exists():
        return None
    os.utime(path.parent)
    return path


def _precompiling(command: Sequence[str], header: str) -> str:
    """Returns a shell script that precompiles a header.

    Raises:
        OSError: the cache cannot be written.
    """
    final = _header_folder(command, header)
    folder = Path(tempfile.mkdtemp(dir=final.parent, prefix="."))
    source = folder / "header.h"
    source.write_text(f"#include <{header}>\n")
    make = shlex.join(["nice", *command, "-w", "-x", "c++-header", str(source), "-o", f"{source}.gch"])
    old, new = shlex.quote(str(folder)), shlex.quote(str(final))
    return f"if {make} && [ ! -e {new} ]; then mv {old} {new}; else rm -rf {old}; fi\n"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
