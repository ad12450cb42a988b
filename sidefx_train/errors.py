"""Errors, each with a stable code and the user's file and line.

``CODES`` is the registry: the meaning of each code and what to do about it. ``docs/graph-breaks.md`` lists the same
codes; a test compares the two.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass

CODES: dict[str, tuple[str, str]] = {
    # capture
    "SFX101": ("data-dependent branch", "Decide on values that do not live in tensors, or use torch.where."),
    "SFX102": ("operation that cannot run on fake tensors", "Move it out of the step or use an aten operation."),
    "SFX103": ("call with effects outside the step", "Move the call out of the step."),
    "SFX104": ("object that cannot be shadowed", "Pass its contents as tensors or plain Python values."),
    "SFX105": ("unsupported bytecode", "Rewrite the construct, or report the opcode."),
    "SFX106": ("value known only after the step ran", "Use the value after the step, or keep it a tensor."),
    "SFX107": ("autograd graph that cannot be returned", "Return a detached tensor, or run backward inside."),
    "SFX108": ("change to a tensor that cannot be replayed", "Use an in-place operation, or do it outside the step."),
    "SFX109": ("tensor type that is not supported", "Use plain dense torch.Tensor objects."),
    "SFX110": ("random state changed inside the step", "Seed outside the step."),
    "SFX111": ("unsupported construct", "Rewrite the construct; the message says which one."),
    "SFX112": ("backward through a graph from outside", "No action needed: it runs natively, between two parts."),
    "SFX113": ("loop that continues after a graph break", "No action needed: it continues, and ends, natively."),
    "SFX114": ("list that gets longer at every call", "Keep a running total, or read the list outside the step."),
    "SFX115": (
        "object with an observable finalizer",
        "Hold the object outside of the step, or drop it there.",
    ),
    "SFX121": (
        "gradients are reduced between processes",
        "No action needed: the step runs eagerly, as a whole, on every rank.",
    ),
    # compilation and running
    "SFX201": ("the backend raised", "See the chained exception; backend='aot_eager' separates capture from lowering."),
    "SFX202": ("the captured step raised", "The step was run again eagerly, which raised the error shown."),
    "SFX203": ("recapture limit reached", "See report.recaptures: one value keeps changing."),
    "SFX204": ("internal error during capture", "Please report it with the chained traceback."),
    "SFX205": ("verification failed", "The captured step and eager disagree; please report it."),
    "SFX206": ("compiling in the background", "No action needed: steps run eagerly until the graph is compiled."),
    "SFX207": (
        "the captured step stopped halfway",
        "Begin again from a checkpoint: its Python objects were not updated. Report it if no other process is why.",
    ),
    "SFX208": (
        "an assumed condition did not hold",
        "No action needed: the step ran eagerly. Where it happens often, the step is captured in parts around it.",
    ),
    "SFX209": (
        "slower than eager",
        "The step runs eagerly from now on; keep_slower=True keeps it captured. The report has both times.",
    ),
    "SFX210": (
        "timed to compare with eager",
        "No action needed: a few of the first steps run eagerly. keep_slower=True captures them all.",
    ),
    "SFX211": (
        "the first step of an optimizer under a GradScaler",
        "No action needed: the step ran eagerly, and the next one is captured.",
    ),
    "SFX212": (
        "a distributed model is not ready",
        "No action needed: the step ran eagerly, as on every rank, and a later one is captured.",
    ),
    "SFX213": (
        "a lazy module has not seen a batch",
        "No action needed: the step ran eagerly, and the next one is captured.",
    ),
    # training loops
    "SFX301": ("left to the framework's own training step", "Remove what the message names to have steps captured."),
    # the installation
    "SFX401": (
        "this build of torch or Python is not supported",
        "Install a release that the message names; python -m sidefx_train doctor says what works.",
    ),
}


FOLLOWING = frozenset({"SFX112", "SFX113"})
"""Codes of breaks that follow from another break."""


FIRST_STEP, LAZY = "SFX211", "SFX213"
"""Codes of steps that run eagerly once, and are captured at the next call."""


@dataclass(frozen=True)
class Location:
    """A line in the user's source."""

    file: str
    line: int
    function: str = "<unknown>"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class SideFXError(RuntimeError):
    """Base of this library's errors.

    Attributes:
        code: stable code, a key of :data:`CODES`.
        location: the user's file and line, or ``None`` where there is none.
    """

    def __init__(self, code: str, reason: str, location: Location | None = None) -> None:
        self.code = code
        self.reason = reason
        self.location = location
        title, advice = CODES[code]
        line = linecache.getline(location.file, location.line).strip() if location else ""
        shown = f"\n    {line}" if line else ""
        where = f"{location}{shown}\n  " if location else ""
        super().__init__(f"[{code}] {title}: {where}{reason}\n  What to do: {advice}")


class GraphBreakError(SideFXError):
    """The step could not be captured as one graph, and ``fullgraph=True`` was set."""


class BackendError(SideFXError):
    """The backend failed to compile the captured graph."""


class RecaptureLimitError(SideFXError):
    """A step was captured more often than ``recapture_limit``, and ``on_failure="raise"`` was set."""


class UnfinishedError(SideFXError):
    """A captured step raised after it had written to tensors, so it cannot be run again."""


class AssumptionFailed(Exception):
    """An assumed condition of a captured step does not hold; nothing has been changed. Internal."""

    def __init__(self) -> None:
        super().__init__("an assumed condition on a tensor does not hold")


class VerificationError(SideFXError):
    """``verify`` found a difference between the captured step and eager."""


class SideFXWarning(UserWarning):
    """Warns that something could not be captured; the step ran eagerly and the message says why."""


class Unsupported(BaseException):
    """Stops a capture. Internal: never reaches user code, so that no ``except Exception`` of a step catches it."""

    def __init__(self, code: str, reason: str, location: Location | None = None) -> None:
        self.code = code
        self.reason = reason
        self.location = location
        self.defer: str | None = None
        """Name of a class whose calls can be deferred until after the graph: another capture may succeed."""
        self.whole = False
        """The whole step must run eagerly: a resume function cannot continue from here."""
        super().__init__(f"[{code}] {CODES[code][0]}: {reason}")
