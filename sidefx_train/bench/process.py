"""A contender in a separate process, interleaved with others after its first steps.

First steps run alone or beside those of others (rounds.py). Then each process in rotation runs steps for a short time
while the others wait: a slowdown of the machine for seconds affects all of them.
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
"""Approximate duration of one interleaved run of steps."""

LOG_CHARACTERS = 4000

READY, GO, END = "ready", "go", "end"
"""Messages: from the process when it is ready; to it, to run steps, which it answers with the seconds of a step; to it,
to write the rest of its figures to a file."""


class Process:
    """One workload with one contender.

    Args:
        command: command that starts it; messages use its standard input and output.
        environment: environment of the process.
        result: file to which it writes its figures.
        log: file for its other output.
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
        """Waits for its first steps; returns False if it ends before, or takes too long since its start."""
        return self._line(self._started + self._timeout) == READY

    def run_slice(self) -> bool:
        """Runs steps for a short time; returns False if the process has failed."""
        answer = self._line() if self._tell(GO) else ""
        try:
            self._steps.append(float(answer))
        except ValueError:
            self._failure = self._failure or (f"it answered {answer!r}" if answer else "")
            return False
        return True

    def end(self) -> Run:
        """Returns its figures; ``slices`` are the seconds of a step in each interleaved run."""
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
        if run["status"] == "failed":
            run["log"] = self.log()[-LOG_CHARACTERS:]
        return {**run, "slices": self._steps, "process_s": time.perf_counter() - self._started}

    def close(self) -> None:
        """Stops the process."""
        self._process.kill()
        self._process.communicate()

    def log(self) -> str:
        """Its other output."""
        return self._log.read_text(errors="replace")

    def _tell(self, text: str) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{text}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended, and its exit status tells why
            return False
        return True

    def _line(self, until: float | None = None) -> str:
        """Returns its next message; empty at its end, or after the timeout if ``until`` is no other time."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        until = time.perf_counter() + self._timeout if until is None else until
        while b"\n" not in self._said:
            left = max(0.0, until - time.perf_counter())
            if not select.select([stream], [], [], left)[0]:
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
    """Returns the process's own standard output for messages; redirects all other output."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream
