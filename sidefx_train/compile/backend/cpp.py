"""Builds the C++ that Inductor generates for a graph.

The function that calls the kernels is long and not worth optimising, the kernels are short and are: built as one unit
at the highest level, as Inductor does it, the caller takes most of the time. Here they are units of their own, compiled
side by side, both without torch's headers where they can do without (``caller.py``, ``vectors.py``), the kernels in as
many parts as there are processors besides the caller's. For kernels that need torch's header it is precompiled once per
machine, behind the first such graph, since that takes three times as long as to read the plain one. A library is kept
under a hash of what it was built from, so equal graphs are built once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sidefx_train import _torch_compat as compat
from sidefx_train import cache
from sidefx_train.compile.backend.caller import prelude
from sidefx_train.compile.backend.vectors import lean_kernels
from sidefx_train.compile.native import products_module

_LARGEST_PART = 12_000
"""Characters of kernels below which splitting costs more than it saves: each part reads the headers again."""

_ENTRY = r"""
#include <Python.h>
#include <exception>

struct SidefxHandles {
    AtenTensorHandle* at;
    explicit SidefxHandles(Py_ssize_t count) : at(new AtenTensorHandle[count]()) {}
    SidefxHandles(const SidefxHandles&) = delete;
    ~SidefxHandles() { delete[] at; }
};

// call(capsules of inputs) -> capsules of outputs
static PyObject* sidefx_call(PyObject*, PyObject* given) {
    const Py_ssize_t count = PyList_GET_SIZE(given);
    SidefxHandles inputs(count), made(@OUTPUTS@);
    AtenTensorHandle* outputs = made.at;
    for (Py_ssize_t i = 0; i < count; ++i)
        inputs.at[i] = reinterpret_cast<AtenTensorHandle>(PyCapsule_GetPointer(PyList_GET_ITEM(given, i), nullptr));
    try {
        inductor_entry_impl(inputs.at, outputs);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "an error without a name in compiled code");
    }
    if (PyErr_Occurred()) return nullptr;
    PyObject* result = PyList_New(@OUTPUTS@);
    for (Py_ssize_t i = 0; result && i < @OUTPUTS@; ++i) {
        PyObject* item = outputs[i] ? PyCapsule_New(reinterpret_cast<void*>(outputs[i]), nullptr, nullptr)
                                    : Py_NewRef(Py_None);
        PyList_SET_ITEM(result, i, item);
    }
    return result;
}

static PyMethodDef sidefx_methods[] = {
    {"call", sidefx_call, METH_O, nullptr},
#ifdef SIDEFX_PRODUCT
    {"bind", sidefx_bind, METH_O, nullptr},
#endif
    {nullptr, nullptr, 0, nullptr}};
static struct PyModuleDef sidefx_module = {PyModuleDef_HEAD_INIT, "sidefx_graph", nullptr, -1, sidefx_methods};
PyMODINIT_FUNC PyInit_sidefx_graph(void) { return PyModule_Create(&sidefx_module); }
"""


_PRODUCT = """
typedef void (*SidefxProduct)(const float*, int64_t, int64_t, const float*, int64_t, int64_t, const float*, float*,
                              int64_t, int64_t, int64_t, int64_t);
static SidefxProduct sidefx_product = nullptr;  // of the native module

static AOTITorchError sidefx_call_product(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b,
                                          AtenTensorHandle* bias, int64_t relu) {
    void *to, *left, *right, *added = nullptr;
    int64_t *left_size, *left_stride, *right_size, *right_stride;
    aoti_torch_get_data_ptr(out, &to);
    aoti_torch_get_data_ptr(a, &left);
    aoti_torch_get_data_ptr(b, &right);
    if (bias) aoti_torch_get_data_ptr(*bias, &added);
    aoti_torch_get_sizes(a, &left_size);
    aoti_torch_get_strides(a, &left_stride);
    aoti_torch_get_sizes(b, &right_size);
    aoti_torch_get_strides(b, &right_stride);
    sidefx_product((const float*)left, left_stride[0], left_stride[1], (const float*)right, right_stride[0],
                   right_stride[1], (const float*)added, (float*)to, left_size[0], right_size[1], left_size[1], relu);
    return AOTI_TORCH_SUCCESS;
}
static AOTITorchError @PRODUCT@(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b,
                                AtenTensorHandle* bias = nullptr) {
    return sidefx_call_product(out, a, b, bias, 0);
}
static AOTITorchError @PRODUCT@_relu(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b,
                                     AtenTensorHandle* bias = nullptr) {
    return sidefx_call_product(out, a, b, bias, 1);
}
static PyObject* sidefx_bind(PyObject*, PyObject* function) {
    sidefx_product = (SidefxProduct)PyCapsule_GetPointer(function, "sidefx_product");
    if (!sidefx_product) return nullptr;
    Py_RETURN_NONE;
}
"""


class BuildFailed(Exception):
    """The compiler refused generated code; the text is its first error."""


def build_library(
    caller: str,
    kernels: str,
    outputs: int,
    libraries: Sequence[str] = (),
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """Builds and keeps a library; equal sources are built once.

    Args:
        caller: source of ``inductor_entry_impl``.
        kernels: source of the kernels it calls.
        outputs: how many tensors it returns.
        libraries: further files to link.
        meanwhile: called while the compiler runs.

    Returns:
        The library's name in the cache.

    Raises:
        BuildFailed: it does not compile, or cannot be kept.
    """
    quick, thorough = compat.cpp_command(quick=True), compat.cpp_command(quick=False)
    include = f"#include <{compat.WRAPPER_HEADER}>"
    whole = _Unit(_whole_caller(caller, include, f"{include}\n", outputs), quick)
    parts = [_Unit(part, thorough, compat.KERNEL_HEADER) for part in _parts(kernels)]
    lean_caller = prelude(caller) if caller.count(include) == 1 and compat.KERNEL_HEADER not in caller else None
    if lean_caller is not None:
        debuggable = ["-Og" if flag == "-O1" else flag for flag in quick]
        lean = _Unit(_whole_caller(caller, include, lean_caller, outputs), debuggable, lean=_is_gnu(quick[0]))
        try:
            return _build([lean, *map(_without_header, parts)], libraries, meanwhile)
        except BuildFailed:  # it uses more than the lean ones have: compiled with torch's headers, or refused for good
            pass
    return _build([whole, *parts], libraries, meanwhile)


@dataclass(frozen=True)
class _Unit:
    """A source and the compiler's words for it, without files.

    Attributes:
        text: the source.
        command: the compiler's words.
        header: one that may be precompiled.
        lean: nothing of torch's but its C interface is in it.
    """

    text: str
    command: list[str]
    header: str | None = None
    lean: bool = False


def _without_header(part: _Unit) -> _Unit:
    """The same kernels without torch's header, if they can do without."""
    if not _is_gnu(part.command[0]):
        return part
    found = re.search(r"-D ?(CPU_CAPABILITY_\w+)", " ".join(part.command))
    text = lean_kernels(part.text, found[1] if found is not None else "")
    return part if text is None else _Unit(text, ["-O2" if word == "-O3" else word for word in part.command], lean=True)


def _whole_caller(caller: str, include: str, head: str, outputs: int) -> str:
    """The source of the caller, ``head`` in the place of torch's header, with the function that Python calls."""
    products = ""
    if compat.PRODUCT_FUNCTION in caller:
        products = "#define SIDEFX_PRODUCT\n" + _PRODUCT.replace("@PRODUCT@", compat.PRODUCT_FUNCTION)
    return head + products + caller.replace(include, "") + _ENTRY.replace("@OUTPUTS@", str(outputs))


def _build(units: list[_Unit], libraries: Sequence[str], meanwhile: Callable[[], None]) -> str:
    """Compiles and links; the first unit is the caller."""
    linked = compat.cpp_link_flags()
    compiler = units[0].command[0]
    lean = all(unit.lean for unit in units) and not libraries
    words = [word for unit in units for word in (*unit.command, unit.text)]
    key = _digest(compiler_version(compiler), *linked, *libraries, *words)
    known = cache.load("build", key)
    if known is not None and cache.library(known["library"]) is not None:
        return str(known["library"])
    with tempfile.TemporaryDirectory(prefix="sidefx_") as folder:
        commands, objects = [], []
        for i, unit in enumerate(units):
            source = Path(folder) / f"part{i}.cpp"
            source.write_text(unit.text)
            include = _precompiled(unit.command, unit.header) if unit.header is not None else None
            extra = ["-include", str(include)] if include is not None else []
            objects.append(str(source.with_suffix(".o")))
            commands.append([*unit.command, *extra, "-w", "-c", str(source), "-o", objects[-1]])
        if lean:
            linked = [f"-L{folder}", "-Wl,--no-as-needed", f"-l{compat.C_INTERFACE_LIBRARY}"]
            commands.append(_stand_in(compiler, folder))
        _run_all(commands, meanwhile)
        built = Path(folder) / "graph.so"
        _run_all([[compiler, "-shared", "-fPIC", "-fopenmp", *objects, "-o", str(built), *linked, *libraries]])
        name = cache.add_library(built)
    if name is None:
        raise BuildFailed("the library cannot be kept")
    cache.store("build", key, {"library": name}, f"{len(units) - 1} parts of kernels")
    for header in {unit.header for unit in units if unit.header is not None}:
        prepare_header(header)
    return name


def _stand_in(compiler: str, folder: str) -> list[str]:
    """Makes an empty library with the name of torch's, which is loaded anyway: to read all its symbols takes longer
    than to link."""
    name = f"lib{compat.C_INTERFACE_LIBRARY}.so"
    return [compiler, "-shared", f"-Wl,-soname,{name}", "-x", "c", os.devnull, "-o", str(Path(folder) / name)]


def load_library(name: str) -> Callable[[list[Any]], list[Any]] | None:
    """The function in a library: from capsules of inputs to those of outputs.

    ``None`` if the library is gone, or the native module that it calls.
    """
    path = cache.library(name)
    module = cache.load_module("sidefx_graph", path) if path is not None else None
    if module is None:
        return None
    if hasattr(module, "bind"):
        native = products_module()
        if native is None:
            return None
        module.bind(native.product_function())
    return module.call  # type: ignore[no-any-return]


def prepare_header(header: str) -> None:
    """Precompiles a header of kernels for later graphs, if that has not been done on this machine.

    A process of its own does it, at low priority; it is not waited for and outlives this one.
    Inductor's setting for its own headers (``TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS``) turns it off.
    """
    command = compat.cpp_command(quick=False)
    if not compat.precompiles_headers() or not _is_gnu(command[0]) or _precompiled(command, header) is not None:
        return
    script = _precompiling(command, header)
    if script:
        quiet = subprocess.DEVNULL
        subprocess.Popen(["sh", "-c", script], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def accepts_flags(flags: Sequence[str]) -> bool:
    """True if the compiler knows these flags."""
    return _accepts(compat.cpp_compiler(), tuple(flags))


@lru_cache(maxsize=32)
def _accepts(compiler: str, flags: tuple[str, ...]) -> bool:
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@lru_cache(maxsize=4)
def compiler_version(compiler: str) -> str:
    """What a compiler says of itself."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _parts(kernels: str) -> list[str]:
    """Kernels in parts of about equal size, one per processor but the caller's; each kernel includes its header."""
    pieces = re.split(r"(?m)^(?=[ \t]*#include [^\n]*cpp_prefix\.h)", kernels)
    shared, pieces = pieces[0], pieces[1:]
    if shared.strip() or not pieces:  # something that all of them may need
        return [kernels] if kernels.strip() else []
    count = max(1, min((os.cpu_count() or 1) - 1, len(kernels) // _LARGEST_PART))
    parts = [""] * count
    for piece in sorted(pieces, key=len, reverse=True):
        smallest = min(range(count), key=lambda i: len(parts[i]))
        parts[smallest] += piece
    return parts


def _run_all(commands: list[list[str]], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Runs compilers side by side, and ``meanwhile`` beside them; the first error ends all."""
    running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        meanwhile()
        for process in running:
            _, said = process.communicate()
            if process.returncode != 0:
                errors = [line for line in said.splitlines() if "error" in line] or said.splitlines() or ["no message"]
                raise BuildFailed(errors[0][:300])
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _is_gnu(compiler: str) -> bool:
    """Only GCC has the built-in functions of ``vectors.py``, and takes precompiled headers as they are given here."""
    return "Free Software Foundation" in compiler_version(compiler)


def _header_folder(command: Sequence[str], header: str) -> Path:
    return (
        cache.machine_dir() / "headers" / _digest(compiler_version(command[0]), compat.torch_build(), *command, header)
    )


def _precompiled(command: Sequence[str], header: str) -> Path | None:
    """A header beside its precompiled form, if that exists."""
    path = _header_folder(command, header) / "header.h"
    if not path.with_suffix(".h.gch").exists():
        return None
    os.utime(path.parent)
    return path


def _precompiling(command: Sequence[str], header: str) -> str:
    """A shell script that precompiles a header; nothing where the cache cannot be written."""
    final = _header_folder(command, header)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=final.parent, prefix="."))
    except OSError:
        return ""
    source = folder / "header.h"
    source.write_text(f"#include <{header}>\n")
    make = shlex.join(["nice", *command, "-w", "-x", "c++-header", str(source), "-o", f"{source}.gch"])
    old, new = shlex.quote(str(folder)), shlex.quote(str(final))
    return f"if {make} && [ ! -e {new} ]; then mv {old} {new}; else rm -rf {old}; fi\n"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
