"""Frame of a code object, and its handled exceptions."""

from __future__ import annotations

import copy
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.code import CodeInfo

NULL: Any = object()  # its class is not tracked by gc.get_objects()
"""An unbound local variable, or the empty half of a call's two callable slots."""

RETURNED = 1
YIELDED = 2


class Frame:
    """Locals, stack and position of one activation.

    Attributes:
        info: the decoded code.
        code: the code object.
        globals: the function's globals.
        locals: one entry per slot: a value, a cell, or :data:`NULL`.
        namespace: the local mapping of a class body or of executed code, ``None`` in a function.
        stack: evaluation stack; ``push`` and ``pop`` are its bound methods.
        pc: index of the next instruction.
        began: number of the last instruction begun, counted by the interpreter.
        counts: by index the number of the last time that the instruction was begun.
        back: the frame that called this one, while it runs.
        closure: the function's cells.
        result: the returned or yielded value.
        done: true once the frame has returned or raised.
    """

    __slots__ = (
        "back",
        "began",
        "closure",
        "code",
        "counts",
        "done",
        "globals",
        "info",
        "instructions",
        "locals",
        "namespace",
        "pc",
        "pop",
        "push",
        "result",
        "stack",
    )  # fmt: skip

    def __init__(
        self,
        info: CodeInfo,
        namespace_globals: dict[str, Any],
        slots: list[Any],
        closure: tuple[types.CellType, ...] | None = None,
        namespace: Any = None,
    ) -> None:
        self.info = info
        self.code = info.code
        self.instructions = info.instructions
        self.globals = namespace_globals
        self.locals = slots
        self.closure = closure
        self.namespace = namespace
        self.stack: list[Any] = []
        self.push = self.stack.append
        self.pop = self.stack.pop
        self.pc = 0
        self.began = 0
        self.counts: dict[int, int] = {}
        self.back: Frame | None = None
        self.result: Any = None
        self.done = False

    def take(self, count: int) -> list[Any]:
        """Pops ``count`` values and returns them in the order they were pushed."""
        if not count:
            return []
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    @property
    def line(self) -> int:
        """Line of the current instruction."""
        offset = self.instructions[max(self.pc - 1, 0)].offset
        for start, end, line in self.code.co_lines():
            if start <= offset < end and line is not None:
                return line
        return self.code.co_firstlineno

    def __repr__(self) -> str:
        return f"<Frame {self.code.co_name} {self.code.co_filename}:{self.line}>"


COPYING = frozenset({copy.copy.__code__, copy.deepcopy.__code__})
"""Code that runs without a break, captured or natively: its memo and the reduced objects do not survive one."""


def in_copy(frame: Frame | None) -> bool:
    """Returns True if ``copy.copy`` or ``copy.deepcopy`` runs in a frame or in one of its callers."""
    while frame is not None:
        if frame.code in COPYING:
            return True
        frame = frame.back
    return False


class Handled:
    """The handled exception, linked to the one that the caller of a generator handles."""

    __slots__ = ("previous", "value")

    def __init__(self) -> None:
        self.value: BaseException | None = None
        self.previous: Handled | None = None

    def topmost(self) -> BaseException | None:
        """Returns the innermost handled exception, like ``sys.exception()``."""
        item: Handled | None = self
        while item is not None:
            if item.value is not None:
                return item.value
            item = item.previous
        return None
