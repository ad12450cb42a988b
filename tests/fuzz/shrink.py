"""Shortens a failing program: removes statements as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable


def shrink(source: str, fails: Callable[[str], bool], most: int = 400) -> str:
    """Returns the shortest program found that still fails.

    Args:
        source: a program for which ``fails`` is true.
        fails: returns whether a program fails; only called with programs that can be compiled.
        most: largest number of programs tried.
    """
    lines = source.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("def build("))
    tried = 0
    changed = True
    while changed and tried < most:
        changed = False
        position = len(lines) - 1
        while position > first and tried < most:
            for shorter in (_without(lines, position), _unwrapped(lines, position)):
                text = "\n".join(shorter)
                if shorter == lines or not _compiles(text):
                    continue
                tried += 1
                if fails(text):
                    lines, changed = shorter, True
                    break
            position = min(position, len(lines)) - 1
    return "\n".join(lines)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _block(lines: list[str], position: int) -> int:
    """Returns the end of the block that a line opens."""
    end = position + 1
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > _indent(lines[position])):
        end += 1
    return end


def _without(lines: list[str], position: int) -> list[str]:
    if not lines[position].strip():
        return lines
    return lines[:position] + lines[_block(lines, position) :]


def _unwrapped(lines: list[str], position: int) -> list[str]:
    """Returns the lines with a compound statement replaced by its body."""
    end = _block(lines, position)
    if end == position + 1 or lines[position].lstrip().startswith("def "):
        return lines
    shift = _indent(lines[position + 1]) - _indent(lines[position])
    return lines[:position] + [line[shift:] for line in lines[position + 1 : end]] + lines[end:]


def _compiles(text: str) -> bool:
    try:
        compile(text, "<shorter>", "exec")
    except SyntaxError:
        return False
    return True
