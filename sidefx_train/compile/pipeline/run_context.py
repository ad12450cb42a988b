"""A call of a step, and what the entries of a step refer to when they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sidefx_train.compile.capture.resume.driver import Parts


class Call(NamedTuple):
    """The arguments of one call of a step. Nothing may keep it beyond the call: it refers to the program's objects."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class RunContext:
    """What the entries of one step refer to when they run; the same for all of them.

    Attributes:
        failed: ``failed(error, args, kwargs)``, called by generated code when the graph raises.
        differs: called with a description if a compiled graph is found wrong.
        rest_computes: called when a native rest of the step computes with tensors.
        ended_in_parts: called when a call in parts has returned.
        parts: the parts of the step, with which suspended frames continue.
        is_part: the step is the rest of another, whose driver continues it.
    """

    failed: Callable[..., Any]
    differs: Callable[[str], None]
    rest_computes: Callable[[], None]
    ended_in_parts: Callable[[], None]
    parts: Parts
    is_part: bool
