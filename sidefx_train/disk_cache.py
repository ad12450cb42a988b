"""The disk cache shared by processes: compiled graphs, libraries, precompiled headers, measurements.

A *record* is a small file whose first lines describe it (format, kind, key, size, hash of the rest). It is trusted only
if the description is correct and the file belongs to the user. The name of a *library* is the hash of its bytes, which
are hashed again before it is loaded. Every file is written under a temporary name and renamed, so that a reader never
sees half a file. A file that fails these checks is ignored with a warning and created again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import getpass
import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sidefx_train.errors import SideFXWarning

_FORMAT = "sidefx_train cache 1"
PACKAGE_DIR = str(Path(__file__).parent)
_RECORD, _LIBRARY = ".sfx", ".so"
_DEFAULT_LIMIT_MB = 2048
_used_here: set[str] = set()
"""Names of libraries that this process has built or looked up."""
_written: dict[Path, int] = {}
"""Bytes that this process has written to a folder since it last knew the folder's size."""
_SPARE = 64
"""The part of the limit that :func:`shrink` leaves free: with as much written, the size is looked up again."""


@dataclass(frozen=True)
class CacheEntry:
    """One file or folder of the cache.

    Attributes:
        path: its path.
        kind: ``"graph"``, ``"native"``, ``"library"``, ``"headers"`` or ``"other"`` (measurements).
        size: bytes.
        used: time of creation or last load, in seconds since the epoch.
    """

    path: Path
    kind: str
    size: int
    used: float

    @property
    def label(self) -> str:
        """Description of what it was made from, which is in the file."""
        if self.path.suffix == _RECORD:
            return _label(self.path)
        return self.path.name if self.kind == "other" else self.path.stem[:16]


def cache_dir() -> Path:
    """Returns the cache folder; creates it if it does not exist.

    ``SIDEFX_CACHE_DIR`` sets the folder. The default is a folder inside ``TORCHINDUCTOR_CACHE_DIR``, as it was set when
    this library was imported, or else inside the system's temporary folder. ``SIDEFX_CACHE_MB`` limits its size (2048);
    the least recently used files are removed first.
    """
    return _folder(os.environ.get("SIDEFX_CACHE_DIR") or _inductors)


def machine_dir() -> Path:
    """Returns the folder for files that depend only on the machine and take long to build (precompiled headers, native
    modules): :func:`cache_dir`, but never inside ``TORCHINDUCTOR_CACHE_DIR``, which people change per run."""
    return _folder(os.environ.get("SIDEFX_CACHE_DIR"))


@lru_cache(maxsize=8)
def _folder(root: str | None) -> Path:
    folder = (Path(root) if root else Path(tempfile.gettempdir()) / f"sidefx_train_{_user()}") / "sidefx"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        _warn(f"{folder} cannot be created ({error}): nothing is cached beyond this process")
    else:
        if folder.stat().st_uid == _user():
            return folder
        _warn(f"{folder} belongs to another user and is not used")
    return Path(tempfile.mkdtemp(prefix="sidefx_train_"))


def load(kind: str, key: str, machine: bool = False) -> Any:
    """Returns the value that :func:`store` saved, or ``None`` if there is no valid record.

    Args:
        kind: see :class:`CacheEntry`.
        key: key of the record.
        machine: use :func:`machine_dir`, in this function and the following ones.
    """
    path = _record_path(kind, key, machine)
    try:
        with path.open("rb") as file:
            _check_owner(file.fileno())
            return _read(file.read(), kind, key)[1]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zlib.error) as error:
        _ignore(path, error)
        return None
    finally:
        _touch(path)


def store(kind: str, key: str, value: Any, label: str = "", machine: bool = False) -> bool:
    """Saves a JSON-able value under a key; returns False if the folder cannot be written."""
    payload = zlib.compress(json.dumps(value).encode(), 1)
    header = {"kind": kind, "key": key, "label": label, "size": len(payload), "sha256": _digest(payload)}
    done = _write(_record_path(kind, key, machine), f"{_FORMAT}\n{json.dumps(header)}\n".encode() + payload)
    place = _place(machine)
    if done and (place not in _written or _written[place] >= limit_bytes() // _SPARE):
        shrink()
    return done


def add_library(built: Path, machine: bool = False) -> str | None:
    """Adds a shared library and returns its name, the hash of its bytes; returns ``None`` on failure."""
    content = built.read_bytes()
    name = _digest(content)
    _used_here.add(name)
    return name if _write(library_path(name, machine), content) else None


def library(name: str, machine: bool = False) -> Path | None:
    """Returns the path of a library if it exists and its bytes still have the hash in its name."""
    path = library_path(name, machine)
    _used_here.add(name)
    try:
        with path.open("rb") as file:
            _check_owner(file.fileno())
            if _digest(file.read()) != name:
                raise ValueError("its contents have changed since it was built")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _ignore(path, error)
        return None
    _touch(path)
    return path


def load_module(name: str, path: Path) -> ModuleType | None:
    """Loads the extension module in a library; returns ``None`` if another process has removed the file."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError:
        if path.exists():
            raise
        return None
    spec.loader.exec_module(module)
    return module


def library_path(name: str, machine: bool = False) -> Path:
    """Returns the path of a library in the cache."""
    return _place(machine) / "libraries" / f"{name}{_LIBRARY}"


def entries() -> list[CacheEntry]:
    """Returns all files in the cache, most recently used first."""
    return sorted(_entries(), key=lambda entry: -entry.used)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for the time of a block, or until the process ends while a thread is in the block."""
    folder = Path(tempfile.mkdtemp(prefix="sidefx_"))
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)
    try:
        yield folder
    finally:
        atexit.unregister(remove)
        remove()


def clear() -> int:
    """Removes everything; returns the bytes freed. Libraries in use by a running process stay loaded there."""
    freed = 0
    for entry in entries():
        freed += _remove(entry)
    return freed


def limit_bytes() -> int:
    """Returns the size limit of the cache in bytes."""
    text = os.environ.get("SIDEFX_CACHE_MB", "")
    try:
        return int(float(text or _DEFAULT_LIMIT_MB) * (1 << 20))
    except ValueError:
        _warn(f"SIDEFX_CACHE_MB={text!r} is not a number; {_DEFAULT_LIMIT_MB} is used")
        return _DEFAULT_LIMIT_MB << 20


def shrink() -> int:
    """Removes least recently used files if the cache is above its limit; returns the bytes freed.

    Some space is left free, so that the sizes of all files need not be looked up whenever one is written. Libraries
    that this process has built or looked up stay: it may be about to load them.
    """
    known, limit, freed = entries(), limit_bytes(), 0
    _written.update(dict.fromkeys((cache_dir(), machine_dir()), 0))
    total = sum(entry.size for entry in known)
    known = [entry for entry in known if entry.kind != "library" or entry.path.stem not in _used_here]
    while known and total - freed > limit - limit // _SPARE:
        freed += _remove(known.pop())
    return freed


# --- files -------------------------------------------------------------------------------------------------------


def _place(machine: bool) -> Path:
    return machine_dir() if machine else cache_dir()


def _record_path(kind: str, key: str, machine: bool) -> Path:
    return _place(machine) / f"{kind}s" / f"{key}{_RECORD}"


def _read(content: bytes, kind: str, key: str) -> tuple[dict[str, Any], Any]:
    form, head, payload = content.split(b"\n", 2)
    if form.decode() != _FORMAT:
        raise ValueError(f"it does not start with {_FORMAT!r}")
    header = json.loads(head)
    if (header["kind"], header["key"]) != (kind, key):
        raise ValueError("it was made for something else")
    if (header["size"], header["sha256"]) != (len(payload), _digest(payload)):
        raise ValueError("its contents are damaged")
    return header, json.loads(zlib.decompress(payload))


def _write(path: Path, content: bytes) -> bool:
    if path.exists() and path.suffix == _LIBRARY and _digest(path.read_bytes()) == path.stem:
        return True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
        for place in (path.parent, path.parent.parent):
            if place in _written:
                _written[place] += len(content)
    except OSError as error:
        _warn(f"{path} cannot be written ({error}): it is created again in the next process")
        return False
    return True


def _entries() -> Iterator[CacheEntry]:
    for folder in {cache_dir(), machine_dir()}:
        for path in _inside(folder):
            name = os.path.basename(path)
            if not os.path.isdir(path):
                found = [(path, "other")]
            elif name == "headers":
                found = [(each, "headers") for each in _inside(path)]
            elif name == "libraries":
                found = [(each, "library") for each in _inside(path) if each.endswith(_LIBRARY)]
            else:
                found = [(each, name.rstrip("s")) for each in _inside(path) if each.endswith(_RECORD)]
            for each, kind in found:
                with contextlib.suppress(OSError):  # another process removed it
                    status = os.stat(each)
                    files = map(os.stat, _inside(each)) if stat.S_ISDIR(status.st_mode) else [status]
                    yield CacheEntry(Path(each), kind, sum(file.st_size for file in files), status.st_mtime)


def _inside(folder: str | Path) -> list[str]:
    """Returns the paths in a folder; without :class:`~pathlib.Path`, which takes most of the time for thousands."""
    try:
        with os.scandir(folder) as found:
            return [entry.path for entry in found]
    except OSError:  # another process removed it
        return []


def _label(path: Path) -> str:
    try:
        with path.open("rb") as file:
            form, head = file.readline(), file.readline()
        return str(json.loads(head)["label"]) if form.decode().strip() == _FORMAT else "not a file of this library"
    except (OSError, ValueError, KeyError):
        return "damaged"


def _remove(entry: CacheEntry) -> int:
    try:
        shutil.rmtree(entry.path) if entry.path.is_dir() else entry.path.unlink()
    except OSError:
        return 0  # another process was faster, or keeps it
    return entry.size


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # an error while updating the time of last use is harmless
        os.utime(path, (time.time(), time.time()))


def _check_owner(handle: int) -> None:
    status = os.fstat(handle)
    if status.st_uid != _user():
        raise ValueError("it belongs to another user")
    if status.st_mode & 0o002:
        raise ValueError("other users can write to it")


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _chosen_for_inductor() -> str | None:
    """Returns Inductor's folder if the user chose it: Inductor itself sets the variable, to its default and to
    others."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not given:
        return None
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):  # the user has no name
        user = f"uid_{_user()}"
    default = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return None if os.path.abspath(given) == os.path.abspath(default) else given


_inductors = _chosen_for_inductor()


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Returns a hash of every source file of this library: any may affect what is cached."""
    digest = hashlib.sha256()
    for file in sorted(Path(PACKAGE_DIR).rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE_DIR)).encode() + file.read_bytes())
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _ignore(path: Path, error: Exception) -> None:
    reason = str(error) or type(error).__name__
    _warn(f"cache file {path} is ignored: {reason}")


def _warn(text: str) -> None:
    warnings.warn(text, SideFXWarning, stacklevel=3)
