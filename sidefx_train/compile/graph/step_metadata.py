"""What a captured step does to its inputs, and what each tensor that leaves it is made of.

Read off the capture once it has ended, and before anything is compiled: which inputs autograd outside is told of, which
values get tangents, and what is refused is decided by these facts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

OutputKind = Literal[
    "non_alias",
    "alias_of_input",
    "is_input",
    "alias_of_intermediate_save_as_output",
    "alias_of_intermediate",
    "alias_of_intermediate_base_is_user_output",
    "unsafe_view_alias",
    "custom_function_view",
]


@dataclass(frozen=True)
class InputFacts:
    """What happens to a tensor from outside.

    Attributes:
        position: among the inputs of the graph.
        label: how the program finds it.
        leaf: autograd has no history of it at entry.
        requires_grad: at entry.
        mutates_data: its contents change.
        mutates_metadata: its sizes, strides or offset do.
        mutation_hidden: its contents change, and autograd is off wherever they do.
        mutation_in_inference: some of it happens in inference mode.
        updates_history: autograd knows its new value as a result of the step.
        changes_requires_grad: it begins or ceases to require gradients, other than as such a result.
        resizes_storage: its memory gets another size.
        replaces_storage: it is given other memory.
    """

    position: int
    label: str
    leaf: bool
    requires_grad: bool
    mutates_data: bool
    mutates_metadata: bool
    mutation_hidden: bool
    mutation_in_inference: bool
    updates_history: bool
    changes_requires_grad: bool
    resizes_storage: bool
    replaces_storage: bool


@dataclass(frozen=True)
class OutputFacts:
    """A tensor that leaves the step.

    Attributes:
        kind: what it is made of.
        base: what it is a view of, by its position among the inputs (``is_input``, ``alias_of_input``, and an
            ``unsafe_view_alias`` of an input) or the results of the graph; of a ``non_alias``, its own position there.
        dynamic_dims: dimensions of symbolic size.
        requires_grad: autograd knows it, or it is a leaf that requires gradients.
    """

    kind: OutputKind
    base: int
    dynamic_dims: frozenset[int]
    requires_grad: bool


@dataclass(frozen=True)
class StepMetadata:
    """All that is known of a step's inputs and outputs.

    Attributes:
        inputs: tensors, in the order of the graph's inputs.
        outputs: tensors that leave, in the order in which the residual makes them.
        intermediate_bases: results of the graph that leave only as what others are views of.
        tangents: results of the graph to which a gradient comes from outside: their backward is captured.
    """

    inputs: tuple[InputFacts, ...]
    outputs: tuple[OutputFacts, ...]
    intermediate_bases: tuple[int, ...]
    tangents: tuple[int, ...]


def in_words(metadata: StepMetadata) -> str:
    """The facts of a step, a line for each tensor; what does not hold is left out."""
    lines = [f"{facts.label}: {_held(facts, ('position', 'label'))}" for facts in metadata.inputs]
    for number, made in enumerate(metadata.outputs):
        dims = f", dynamic dimensions {sorted(made.dynamic_dims)}" if made.dynamic_dims else ""
        needs = ", requires_grad" if made.requires_grad else ""
        lines.append(f"output {number}: {made.kind} {made.base}{needs}{dims}")
    lines.append(f"results that leave only through views: {list(metadata.intermediate_bases)}")
    lines.append(f"results that get gradients from outside: {list(metadata.tangents)}")
    return "\n".join(lines)


def _held(facts: InputFacts, excluded: tuple[str, ...]) -> str:
    names = [each.name for each in fields(facts) if each.name not in excluded]
    return ", ".join(name for name in names if getattr(facts, name)) or "read"


def dynamic_dims(value: torch.Tensor) -> frozenset[int]:
    """Dimensions of symbolic size."""
    return frozenset(i for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt))
