"""Trace rules: how a capture handles each callable, as data.

- *inlined*: Python functions, unless listed here.
- *native*: called on shadows. C functions of the listed modules and types, and Python functions of torch that only read
  their arguments (they cannot distinguish a fake tensor from a real one).
- *deferred*: calls with effects outside the step and no result that matters; replayed in order after the graph.
- everything else is refused with code SFX103: the capture stops and the step runs eagerly.
"""

from __future__ import annotations

import _thread
import collections
import functools
import inspect
import io
import logging
import os
import socket
import sys
import types
import warnings
import weakref
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

NATIVE_PYTHON = (
    "torch.nn.functional",
    "torch.functional",
    "torch._tensor",
    "torch.autograd",
    "torch.overrides",
    "torch.jit",
    "torch._jit_internal",
    "torch.compiler",
    "torch.backends",
    "torch._utils",
    "torch._VF",
    "torch._ops",
    "torch.utils._device",
    "torch._C",
    "torch.amp",
    "torch.types",
    "torch.return_types",
    "torch.version",
)
"""Modules of Python functions that run natively on fake tensors."""

NATIVE_UPDATES = ("_single_tensor_", "_multi_tensor_")
"""Name prefixes of ``torch.optim``'s update functions: they run natively, the rest of it is inlined."""

DECIDING_OPTIMIZERS = frozenset({"torch.optim.radam", "torch.optim.asgd", "torch.optim._adafactor"})
"""Modules whose update functions branch on a step count and are therefore inlined."""

INLINED_FUNCTIONS = frozenset(
    {"checkpoint", "custom_function_call", "triplet_margin_with_distance_loss", "get_inner_hook", "inner_hook"}
    | {"gaussian_nll_loss", "__torch_function__", "_pop_mode_temporarily", "flags"}
    | {"local_response_norm", "lp_pool1d", "lp_pool2d", "lp_pool3d"}
)
"""Names in native modules that call back into user code, check values of tensors, or call functions that are
intercepted, and are therefore inlined."""

DEVICE_MODULES = frozenset({"torch.cuda", "torch.xpu", "torch.mps", "torch.mtia", "torch.accelerator"})

DEVICE_QUERIES = frozenset(
    {
        "is_available", "device_count", "is_bf16_supported", "is_tf32_supported", "get_arch_list",
        "current_accelerator", "get_device_name", "get_device_capability", "get_device_properties",
    }
)  # fmt: skip
"""Functions of those modules with a process-constant result; computing it loads the driver's library."""

PURE_MODULES = frozenset(
    {
        "builtins", "_operator", "operator", "math", "cmath", "itertools", "functools", "_functools", "collections",
        "_collections", "re", "_sre", "copy", "_struct", "struct", "types", "_abc", "_weakref", "weakref", "enum",
        "_bisect", "_heapq", "_statistics", "statistics", "string", "_string", "array", "fractions",
        "numbers", "dataclasses", "typing", "_typing", "inspect", "_json", "json", "importlib", "_frozen_importlib",
        "importlib._bootstrap", "_warnings", "contextlib", "abc", "datetime", "_datetime", "numpy", "_contextvars",
        "binascii", "zlib", "_hashlib", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3", "_blake2",
    }
)  # fmt: skip
"""Modules whose C functions depend on and change only their arguments (not ``decimal``: it has a context)."""

IMPURE_BUILTINS = frozenset({"open", "input", "exec", "eval", "breakpoint"})

PURE_FUNCTIONS: frozenset[Any] = frozenset(
    {
        sys.intern,
        sys.is_finalizing,
        _thread.RLock,
        _thread.allocate_lock,
        _thread.LockType,  # from Python 3.13 on, `threading.Lock` itself
        os.fspath,
        io.StringIO,
        io.BytesIO,
        getattr(os.path, "_path_normpath", os.path.normpath),  # `normpath` calls it, or is it
    }
)
"""C functions of other modules that depend on and change nothing that a step could observe."""

_QUERIES_OF_OS = ("getpid", "getppid", "getcwd", "cpu_count", "getuid", "geteuid", "getgid", "getegid", "getpgrp")
QUERIES: frozenset[Any] = frozenset({socket.gethostname, *(vars(os)[n] for n in _QUERIES_OF_OS if hasattr(os, n))})
"""C functions without arguments that only read state of the process: the answers are guarded."""

ATOMIC_MODULES = (
    "subprocess",
    "shutil",
    "tempfile",
    "zipfile",
    "tarfile",
    "gzip",
    "bz2",
    "lzma",
    "socket",
    "ssl",
    "http",
    "urllib.request",
    "ftplib",
    "smtplib",
    "sqlite3",
    "csv",
    "secrets",
    "multiprocessing.connection",
    "multiprocessing.managers",
    "multiprocessing.pool",
    "multiprocessing.queues",
    "multiprocessing.shared_memory",
    "concurrent.futures",
    "asyncio.runners",
    "importlib.metadata",
    "torch.serialization",
    "safetensors",
    "pandas",
)
"""Modules whose functions use files, processes and connections, or C code on NumPy arrays at every turn: each call is
atomic and runs natively."""

_INDEXES = "pandas.core.indexes"
_NOT_ATOMIC = {
    ("pandas.core.base", "IndexOpsMixin.tolist"),
    ("csv", "DictWriter.writerow"),
    ("csv", "DictWriter._dict_to_list"),
    ("csv", "DictWriter._dict_to_list.<locals>.<genexpr>"),
    ("importlib.metadata", "PackageNotFoundError.__str__"),
    ("importlib.metadata", "PackageNotFoundError.name"),
    ("importlib.metadata._adapters", "Message.__getitem__"),
}
"""What is not: lookups in an index are constants (``interceptors/third_party/pandas_index.py``), rows are deferred;
what is found about a package, or its error, is only read."""

_OF_FILES = frozenset(
    {
        "chmod", "copy", "copy_into", "cwd", "exists", "getatime", "getctime", "getmtime", "getsize", "glob",
        "group", "hardlink_to", "is_block_device", "is_char_device", "is_dir", "is_fifo", "is_file", "is_junction",
        "is_mount", "is_socket", "is_symlink", "isdir", "isfile", "islink", "iterdir", "lchmod", "lstat",
        "makedirs", "mkdir", "move", "move_into", "open", "owner", "popen", "read_bytes", "read_text", "readlink",
        "realpath", "removedirs", "rename", "renames", "replace", "resolve", "rglob", "rmdir", "samefile", "stat",
        "symlink_to", "touch", "unlink", "walk", "write_bytes", "write_text",
    }
)  # fmt: skip
_CONTEXT_METHODS = ("__init__", "__enter__", "__exit__")
ATOMIC_FUNCTIONS: dict[str, frozenset[str]] = {
    "os": _OF_FILES,
    "genericpath": _OF_FILES,
    "posixpath": _OF_FILES,
    "ntpath": _OF_FILES,
    "pathlib": _OF_FILES,
    "pathlib._local": _OF_FILES,
    "pathlib._abc": _OF_FILES,
    "json": frozenset({"dump", "load"}),
    "uuid": frozenset({"getnode", "uuid1", "uuid4"}),
    "threading": frozenset({"Thread.__init__", "Thread.start", "Thread.join"}),
    "multiprocessing.process": frozenset({"BaseProcess.__init__", "BaseProcess.start", "BaseProcess.join"}),
    "multiprocessing.context": frozenset({"Manager", "Pipe", "Pool", "JoinableQueue", "Queue", "SimpleQueue"}),
    "importlib._bootstrap": frozenset({"_find_spec"}),
    "torch.profiler.profiler": frozenset(
        {"_KinetoProfile.__init__", "profile.__init__", "__enter__", "__exit__", "start", "stop", "step"}
    ),
    "torch.autograd.profiler": frozenset(
        {f"{kind}.{method}" for kind in ("profile", "emit_nvtx", "emit_itt") for method in _CONTEXT_METHODS}
    ),
}
"""Functions of that kind in modules that also contain others."""

CONSTANT_FUNCTIONS = {
    ("importlib.metadata", "metadata"),
    ("importlib.metadata", "version"),
    ("importlib.util", "find_spec"),
}
"""Functions of other modules with a process-constant result (see ``interceptors/process_constants.py``)."""

LOGGING_METHODS = frozenset({"debug", "info", "warning", "warn", "error", "critical", "exception", "log"})

_LIGHTNING_LOGGERS = (
    "lightning.pytorch.loggers",
    "lightning.fabric.loggers",
    "pytorch_lightning.loggers",
    "lightning_fabric.loggers",
)

DEFERRED_METHODS: dict[str, frozenset[str]] = {
    "wandb": frozenset({"log"}),
    "mlflow": frozenset({"log_metric", "log_metrics", "log_param", "log_params"}),
    "tqdm": frozenset({"set_description", "set_description_str", "set_postfix", "set_postfix_str", "update", "write"}),
    "rich": frozenset({"update", "advance", "print", "log"}),
    "torch.utils.tensorboard": frozenset({"add_scalar", "add_scalars", "add_histogram", "add_text", "flush"}),
    "tensorboardX": frozenset({"add_scalar", "add_scalars", "add_histogram", "add_text", "flush"}),
    **dict.fromkeys(_LIGHTNING_LOGGERS, frozenset({"log_metrics", "log_text", "log_image", "log_table", "log_audio"})),
}
"""Calls that only print or record their arguments, by package and name."""


_LOG_OF_CONSOLE = ("rich.console", "log")

READ_BY_DEFERRED_CALLS = (logging.Filterer, logging.Manager, logging.Formatter, compat.PRINT_OPTIONS)
"""Classes of objects that deferred calls read: how tensors are printed, what is logged. A step that changes one from
outside changes it between its own deferred calls."""

VALUE_METHODS = frozenset(
    ("numpy", "data_ptr", "untyped_storage", "storage", "__array__", "share_memory_", "apply_", "map_", "map2_")
    + ("_cdata", "_reduce_ex_internal", "const_data_ptr", "mutable_data_ptr", "is_shared", "storage_type")
)
"""Tensor methods that read contents, addresses or the kind of memory, which exist only when the graph runs."""


def is_atomic(fn: Any) -> bool:
    """Returns True for Python functions inside which a part of a step neither begins nor ends."""
    if type(fn) is not types.FunctionType:
        return False
    return _is_atomic(str(fn.__globals__.get("__name__", "")), fn.__name__, fn.__qualname__)


@functools.lru_cache(maxsize=4096)
def _is_atomic(module: str, name: str, path: str) -> bool:
    if (module, path) in CONSTANT_FUNCTIONS:
        return False
    if not ATOMIC_FUNCTIONS.get(module, frozenset()).isdisjoint((name, path)):
        return True
    if module.startswith(_INDEXES) or (module, path) in _NOT_ATOMIC:
        return False
    return any(module == known or module.startswith(known + ".") for known in ATOMIC_MODULES)


_WHOLE_MODULES = ("torch._higher_order_ops", "torch.fx.experimental.proxy_tensor", "torch.nn.attention.flex_attention")
_NOT_WHOLE = ("torch._higher_order_ops.invoke_subgraph", "torch._higher_order_ops.wrap")


@functools.lru_cache(maxsize=4096)
def is_whole(module: str, name: str) -> bool:
    """Returns True for functions of torch that run natively as a whole where something in them does."""
    if (module, name) == ("torch._functorch.eager_transforms", "linearize"):
        return True
    return module.startswith(_WHOLE_MODULES) and module not in _NOT_WHOLE


def is_torch_callable(fn: Any) -> bool:
    """Returns True for C functions of torch and for operator overloads."""
    module = attribute_of(fn, "__module__")
    if safe_isinstance(module, str) and module.startswith("torch"):
        return True
    if safe_isinstance(fn, compat.OPERATORS):
        return True
    owner = attribute_of(fn, "__self__")
    if safe_isinstance(owner, torch.Tensor):
        return True
    if safe_isinstance(owner, types.ModuleType):
        return owner.__name__.startswith("torch")
    if safe_isinstance(owner, type):
        return owner.__module__.startswith("torch")
    cls = attribute_of(fn, "__objclass__")
    return cls is not None and (
        cls.__module__.startswith("torch") or (issubclass(torch.Tensor, cls) and cls is not object)
    )


def is_pure(fn: Any) -> bool:
    """Returns True for C callables that change only their arguments, and depend on them or on guarded state."""
    if safe_isinstance(fn, type):
        return fn in PURE_FUNCTIONS or _made_by_pure_code(fn)
    if type(fn) is np.ufunc and set("".join(fn.types)) <= set("O->"):  # by `np.frompyfunc`: it calls Python code
        return False
    if type(fn) is types.BuiltinFunctionType and (fn in PURE_FUNCTIONS or fn in QUERIES):
        return True
    owner = attribute_of(fn, "__self__")
    if owner is not None and not safe_isinstance(owner, types.ModuleType):
        kind = owner if safe_isinstance(owner, type) else type(owner)
        if fn.__name__ == "__subclasses__":  # changed by classes created anywhere
            return False
        if runs_pure_code(kind):
            return True
        if type(fn) is types.BuiltinMethodType and not safe_isinstance(owner, type):
            return _has_pure_method(kind, fn.__name__)
    cls = attribute_of(fn, "__objclass__")
    if cls is not None:  # a slot or method of a class of C: that of its own, not of the wrapper's
        return runs_pure_code(cls)
    module = attribute_of(fn, "__module__")
    if module is None and safe_isinstance(owner, types.ModuleType):
        module = owner.__name__
    if module == "builtins" and attribute_of(fn, "__name__", "") in IMPURE_BUILTINS:
        return False
    if safe_isinstance(module, str):
        return module in PURE_MODULES or (module.partition(".")[0] in PURE_MODULES and "random" not in module)
    return runs_pure_code(type(fn))


def _made_by_pure_code(cls: type) -> bool:
    """Returns True if the C code that creates an instance of ``cls`` is pure: its class's, or both constructors'."""
    known = _PURE_MAKERS.get(cls)
    if known is None:
        known = _PURE_MAKERS[cls] = _has_pure_makers(cls)
    return known


_PURE_MAKERS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _has_pure_makers(cls: type) -> bool:
    if cls.__module__.partition(".")[0] in PURE_MODULES:
        return True
    makers = (
        getattr(cls.__new__, "__self__", None),
        getattr(inspect.getattr_static(cls, "__init__"), "__objclass__", None),
    )
    return all(safe_isinstance(owner, type) and owner.__module__ in PURE_MODULES for owner in makers)


def _has_pure_method(cls: type, name: str) -> bool:
    """Returns True if a C method of an object, of any class, is defined by a pure class."""
    found = next((base for base in cls.__mro__ if name in vars(base)), object)
    return found is object or runs_pure_code(found) or found.__module__.partition(".")[0] == "torch"


def runs_pure_code(cls: type) -> bool:
    """Returns True for classes whose C code depends on and changes only its arguments, including the object."""
    for base in cls.__mro__:
        if base is not object and base.__module__.partition(".")[0] in PURE_MODULES:
            return True
    return cls is object


def is_deferred(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for printing, warnings and log records."""
    if fn is print or fn is warnings.warn or fn is warnings.warn_explicit:
        return True
    if args and issubclass(type(args[0]), logging.LoggerAdapter):
        return False  # its `process`, which may be the program's, reads what the step changes
    if args and issubclass(type(args[0]), logging.Logger):
        return attribute_of(fn, "__name__", "") in LOGGING_METHODS or safe_isinstance(fn, functools._lru_cache_wrapper)
    if _is_of_logging(fn) and attribute_of(fn, "__name__", "") in LOGGING_METHODS:
        return True
    return mutates_object_later(fn)


def mutates_object_later(fn: Any) -> bool:
    """Returns True for deferred methods that change their object: a progress bar counts."""
    module, name = attribute_of(fn, "__module__"), attribute_of(fn, "__name__", "")
    return safe_isinstance(module, str) and any(
        module == package or module.startswith(package + ".")
        for package, names in DEFERRED_METHODS.items()
        if name in names
    )


def shows_text(fn: Any) -> bool:
    """Returns True for deferred calls that format their arguments and store nothing."""
    return fn is print or _is_of_logging(fn)


def looks_at_callers(fn: Any) -> bool:
    """Returns True for deferred calls that show the line that made them: a log record, and ``log`` of a console."""
    return _is_of_logging(fn) or (attribute_of(fn, "__module__"), attribute_of(fn, "__name__")) == _LOG_OF_CONSOLE


def _is_of_logging(fn: Any) -> bool:
    return attribute_of(fn, "__module__") == "logging"


def describe(fn: Any) -> str:
    """Returns a callable's name for messages."""
    name = attribute_of(fn, "__qualname__") or attribute_of(fn, "__name__") or type(fn).__qualname__
    module = attribute_of(fn, "__module__")
    return f"{module}.{name}" if safe_isinstance(module, str) and module != "builtins" else str(name)


DATA_METHODS = frozenset(
    name for cls in (torch.Tensor, list, tuple, dict, set, collections.deque, str) for name in dir(cls)
) - {"backward", "register_hook", "apply_"}  # fmt: skip
"""Methods of tensors and containers. A statement that calls no others, and functions of C, may run natively."""

GATHERS: tuple[Any, ...] = (
    len, isinstance, torch.cat, torch.stack, torch.tensor, torch.as_tensor, torch.from_numpy,
    torch.nn.utils.rnn.pad_sequence, np.array, np.asarray, np.stack, np.concatenate, np.vstack,
)  # fmt: skip
"""Functions that make one tensor or array of many: faster natively than as inputs of a graph, each of which is
guarded."""

GATHER_METHODS = frozenset({
    "append", "items", "keys", "values", "to", "unsqueeze", "squeeze", "view", "reshape", "copy", "astype", "numpy",
    "cpu", "detach", "item",
})  # fmt: skip
"""Methods that such a statement may call."""
