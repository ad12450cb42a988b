"""Compile queue: runs compilers while a graph is still being lowered.

A kernel can be compiled as soon as it is written, and the Python entry point before that. They are queued, grouped to
units of some size, and compiled one after the other on the processors that lowering leaves free; the remaining ones are
compiled in parallel when all are known.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


class BuildFailed(Exception):
    """The compiler rejected generated code; the text is its first error."""


@dataclass(frozen=True)
class Unit:
    """A source and its compile command, without files.

    Attributes:
        text: the source.
        command: the compiler and its flags.
        header: header that may be precompiled.
        header_free: it contains nothing of torch except its C interface.
    """

    text: str
    command: tuple[str, ...]
    header: str | None = None
    header_free: bool = False


class CompileQueue:
    """Compiles units in parallel into one folder.

    Args:
        most: limit of running compilers, until all are waited for.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most if most is not None else max(1, (os.cpu_count() or 1) - 1)
        self._folder: Path | None = None
        self._waiting: list[tuple[list[str], Path]] = []
        self._running: dict[Path, subprocess.Popen[str]] = {}
        self._known: dict[Unit, Path] = {}
        self._made: set[Path] = set()
        self._count = 0

    @property
    def folder(self) -> Path:
        """Folder of sources and objects."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sidefx_"))
        return self._folder

    @property
    def idle(self) -> bool:
        """True if a new unit would be compiled at once."""
        self._go_on()
        return not self._waiting and self._busy() < self._most

    def compile(self, unit: Unit, included: Path | None = None) -> Path:
        """Queues a unit, for which :meth:`finish` waits; equal ones once.

        Args:
            unit: what to compile.
            included: a header to include before it.

        Returns:
            The object file.
        """
        if unit not in self._known:
            source = self.folder / f"part{self._count}.cpp"
            self._count += 1
            source.write_text(unit.text)
            made = source.with_suffix(".o")
            extra = ["-include", str(included)] if included is not None else []
            self.run([*unit.command, *extra, "-w", "-c", str(source), "-o", str(made)], made)
            self._known[unit] = made
        return self._known[unit]

    def run(self, command: Sequence[str], made: Path) -> None:
        """Queues a command that creates a file, for which :meth:`finish` waits; once per file."""
        if made not in self._made:
            self._made.add(made)
            self._waiting.append((list(command), made))
        self._go_on()

    def finish(self, while_compiling: Callable[[], None] = lambda: None) -> None:
        """Waits for all; the first error stops all.

        Args:
            while_compiling: called while the compilers run.

        Raises:
            BuildFailed: a compiler failed.
        """
        self._most = max(self._most, self._busy() + len(self._waiting))
        self._go_on()
        while_compiling()
        while self._running:
            _, process = self._running.popitem()
            _, said = process.communicate()
            if process.returncode != 0:
                errors = [line for line in said.splitlines() if "error" in line] or said.splitlines() or ["no message"]
                self.close()
                raise BuildFailed(errors[0][:300])

    def close(self) -> None:
        """Stops running compilers and removes the files."""
        self._waiting.clear()
        for process in self._running.values():
            if process.poll() is None:
                _kill(process.pid)
            process.communicate()
        self._running.clear()
        self._known.clear()
        self._made.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _busy(self) -> int:
        return sum(process.poll() is None for process in self._running.values())

    def _go_on(self) -> None:
        while self._waiting and self._busy() < self._most:
            command, made = self._waiting.pop(0)
            self._running[made] = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": str(self.folder)},
            )


def _kill(process: int) -> None:
    """Ends a compiler and the processes it has started, which it would leave behind to finish their work."""
    children: list[str] = []
    with suppress(OSError):  # no such file, or the process has ended
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    for each in (process, *map(int, children)):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
