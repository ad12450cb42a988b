"""Builds and loads the native module, once per machine, beside Inductor's own compilation.

Where no compiler is found, or the build fails, :func:`native_module` returns ``None`` and torch's operators are used.
"""

from __future__ import annotations

import hashlib
import importlib.util
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

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.backend.native_source import SOURCE

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
_lock = threading.Lock()


def cache_folder() -> Path:
    """Where built code and measurements are kept."""
    root = os.environ.get("SIDEFX_CACHE_DIR") or os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    base = Path(root) if root else Path(tempfile.gettempdir()) / f"sidefx_train_{os.getuid()}"
    folder = base / "sidefx"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def start_build() -> None:
    """Builds the module in the background if it is not there yet."""
    threading.Thread(target=native_module, name="sidefx-native", daemon=True).start()


def native_module() -> ModuleType | None:
    """The module, built on first use; ``None`` if this machine cannot build it."""
    with _lock:
        return _load()


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
        "\0".join([SOURCE, *_FLAGS, platform.python_version(), cpu_description()]).encode()
    ).hexdigest()[:16]
    library = cache_folder() / f"sidefx_native_{key}.so"
    if not library.exists() and not _compile(compiler, library):
        return None
    spec = importlib.util.spec_from_file_location("sidefx_native", library)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.data_ptr_function(address)
    return module


def _compile(compiler: str, library: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, built = Path(folder) / "native.cpp", Path(folder) / "native.so"
        source.write_text(SOURCE)
        command = [compiler, *_FLAGS, "-std=c++17", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}"]
        done = subprocess.run([*command, str(source), "-o", str(built)], capture_output=True, check=False)
        if done.returncode != 0:
            return False
        os.replace(built, library)
    return True
