"""A contender in a process of its own, which takes turns with others once its first steps are done.

The processes of a workload are started one after the other, and each does its first steps alone. Then all of them are
there, and each in turn is told to do steps for a moment while the others wait: what slows the machine down for seconds
slows all of them down.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

Run = dict[str, Any]

SLICE_SECONDS = 0.15
"""Of steps in one turn, about."""

READY, GO, END = "ready", "go", "end"
"""What is said: by the process when it can take turns; to it, for a turn, which it answers with the seconds of a step;
to it, for the rest of its figures, which it leaves in a file."""


class Process:
    """One workload with one contender.

    Args:
        command: what starts it; it talks over its standard input and output.
        environment: of the process.
        result: the file that it leaves its figures in.
        log: the file for what else it says.
        timeout: seconds without an answer after which it counts as failed.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], result: Path, log: Path, timeout: float
    ) -> None:
        self._result, self._log = result, log
        self._started = time.perf_counter()
        self._timeout = timeout
        self._failure = ""
        self._steps: list[float] = []
        with log.open("w") as stream:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=stream)
        self._said = b""

    def becomes_ready(self) -> bool:
        """Waits for its first steps; false if it ends before, or takes too long."""
        return self._line() == READY

    def turn(self) -> bool:
        """Steps for a moment; false if it has failed."""
        answer = self._line() if self._tell(GO) else ""
        try:
            self._steps.append(float(answer))
        except ValueError:
            self._failure = self._failure or (f"it answered {answer!r}" if answer else "")
            return False
        return True

    def end(self) -> Run:
        """Its figures; ``turns`` are the seconds of a step in each turn."""
        if self._process.poll() is None and not self._failure:
            self._tell(END)
            try:
                self._process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                self._give_up()
        self.close()
        run: Run = {"status": "failed", "note": self._failure or f"exit: {self._process.returncode}"}
        if self._result.exists() and not self._failure:
            run = json.loads(self._result.read_text())
        return {**run, "slices": self._steps, "process_s": time.perf_counter() - self._started}

    def close(self) -> None:
        """Ends it, wherever it is."""
        self._process.kill()
        self._process.communicate()

    def log(self) -> str:
        """What else it has said."""
        return self._log.read_text()

    def _tell(self, text: str) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{text}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended, and its exit status tells why
            return False
        return True

    def _line(self) -> str:
        """What it says next; empty where it says no more, or not in time."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        until = time.perf_counter() + self._timeout
        while b"\n" not in self._said:
            left = until - time.perf_counter()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                self._give_up()
                return ""
            more = os.read(stream, 4096)
            if not more:
                self._process.wait()
                return ""
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line.decode().strip()

    def _give_up(self) -> None:
        self._failure = f"exit: timeout after {self._timeout:.0f} s"
        self._process.kill()


def answers() -> TextIO:
    """For the process itself: its standard output as it was, which from then on nothing else is written to."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream
