"""How Inductor builds C++: compiler, flags, headers, vector instructions."""

from __future__ import annotations

import os
import shlex
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def _without_setuptools() -> Iterator[None]:
    """Context that locates torch's headers without their own module, which imports ``setuptools``."""
    name = "torch.utils.cpp_extension"
    if name in sys.modules:
        yield
        return
    root = os.path.dirname(torch.__file__)
    headers, libraries = os.path.join(root, "include"), os.path.join(root, "lib")
    both = [headers, os.path.join(headers, "torch", "csrc", "api", "include")]

    def include_paths(device_type: str = "cpu", torch_include_dirs: bool = True) -> list[str]:
        return list(both) if torch_include_dirs else []

    def library_paths(device_type: str = "cpu", torch_include_dirs: bool = True, **_: Any) -> list[str]:
        return [libraries] if torch_include_dirs else []

    known = types.ModuleType(name)
    vars(known).update(TORCH_LIB_PATH=libraries, include_paths=include_paths, library_paths=library_paths)
    vars(known).update(CUDA_HOME=os.environ.get("CUDA_HOME"), ROCM_HOME=os.environ.get("ROCM_HOME"))
    sys.modules[name] = known
    try:
        yield
    finally:
        if sys.modules.get(name) is known:
            del sys.modules[name]


def cpp_command(quick: bool) -> list[str]:
    """Returns the compiler and its flags for Inductor's C++ for the CPU, without files.

    Args:
        quick: little optimization, for code that only calls kernels.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with _without_setuptools():
        options = CppTorchDeviceOptions(
            vec_isa=pick_vec_isa(), device_type="cpu", compile_only=True, min_optimize=quick
        )
        builder = CppBuilder(name="output", sources="source.cpp", BuildOption=options)
        words = shlex.split(builder.get_command_line())
    places = [i for i, word in enumerate(words) if word.endswith("source.cpp")]
    places += [i + j for i, word in enumerate(words) if word == "-o" for j in (0, 1)]
    places += [
        i for i, word in enumerate(words) if word in ("-c", "-Wall", "-pedantic") or word.startswith(("-l", "-g1"))
    ]
    return [word for i, word in enumerate(words) if i not in places]


def cpp_link_flags() -> list[str]:
    """Returns the libraries that Inductor's C++ needs."""
    root = os.path.dirname(torch.__file__)
    return [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-ltorch_python"]


C_INTERFACE_LIBRARY = "torch_cpu"
"""Library with torch's C interface, and the vector functions that kernels call."""


def cpp_compiler() -> str:
    """Returns the compiler that Inductor uses."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def precompiles_headers() -> bool:
    """Returns True if Inductor is set to precompile headers."""
    from torch._inductor import config

    return bool(config.cpp_cache_precompile_headers)


def torch_build() -> str:
    """Returns torch's version, including its source revision."""
    return f"{torch.__version__} {torch.version.git_version}"


WRAPPER_HEADER = "torch/csrc/inductor/cpp_wrapper/cpu.h"

KERNEL_HEADER = "torch/csrc/inductor/cpp_prefix.h"

C_TYPES_HEADER = "torch/csrc/inductor/aoti_torch/c/macros.h"

LISTS_HEADER = "torch/csrc/stable/c/shim.h"
"""Header of lists for the dispatcher's C interface."""


def c_interface() -> list[str]:
    """Returns the texts of the headers that declare what C++ generated for the CPU may call."""
    include = os.path.join(os.path.dirname(torch.__file__), "include")
    interface = "torch/csrc/inductor/aoti_torch"
    names = ("c/shim.h", "c/shim_cpu.h", "generated/c_shim_cpu.h", "generated/c_shim_aten.h")
    texts = []
    for name in (*(f"{interface}/{name}" for name in names), LISTS_HEADER):
        path = os.path.join(include, name)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                texts.append(file.read())
    return texts


_VECTOR_FLAGS = (
    *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx512vnni"),
    "-mavx512bf16",
)
"""Flags of the instruction sets that Inductor requests; a compiler is tested with all of them at once."""


@contextmanager
def quick_vector_probes(accepts: Callable[[Sequence[str]], bool]) -> Iterator[None]:
    """Context in which the CPU's flags and the compiler's flags decide which vector instructions Inductor may use.

    Inductor compiles and loads a program for each instruction set that the CPU reports, which takes seconds.

    Args:
        accepts: returns True if the compiler accepts flags.
    """
    from torch._inductor import cpu_vec_isa

    before = cpu_vec_isa.VecISA.check_build

    def check(isa: Any, code: str) -> bool:
        flags = tuple(isa.build_arch_flags().split())
        return (set(flags) <= set(_VECTOR_FLAGS) and accepts(_VECTOR_FLAGS)) or accepts(flags)

    cpu_vec_isa.VecISA.check_build = check
    try:
        yield
    finally:
        cpu_vec_isa.VecISA.check_build = before
