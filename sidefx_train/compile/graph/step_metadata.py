"""Metadata of a captured step: what it does to its inputs, and the base of each output.

It is read from the finished capture before anything is compiled, and determines which inputs the outside autograd must
know, which values get tangents, and what is refused.
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
    """What a step does to an outside tensor.

    Attributes:
        position: position among the inputs of the graph.
        label: source expression of the program.
        leaf: it has no autograd history at entry.
        requires_grad: flag at entry.
        mutates_data: its contents change.
        mutates_metadata: its sizes, strides or offset change.
        mutation_hidden: its contents change only while autograd is off.
        mutation_in_inference: some of that happens in inference mode.
        updates_history: its new value is a result of the step in the autograd graph.
        changes_requires_grad: its flag changes, other than as such a result.
        resizes_storage: its storage is resized.
        replaces_storage: its storage is replaced.
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
        kind: how it is made.
        base: its base, by position among the inputs (``is_input``, ``alias_of_input``, and an ``unsafe_view_alias`` of
            an input) or the results of the graph; for a ``non_alias``, its own position there.
        dynamic_dims: dimensions of symbolic size.
        requires_grad: it has a history, or it is a leaf that requires gradients.
    """

    kind: OutputKind
    base: int
    dynamic_dims: frozenset[int]
    requires_grad: bool


@dataclass(frozen=True)
class StepMetadata:
    """Metadata of a step's inputs and outputs.

    Attributes:
        inputs: tensors, in the order of the graph's inputs.
        outputs: output tensors, in the order in which the residual makes them.
        intermediate_bases: results of the graph that leave only as bases of views.
        tangents: results of the graph that get gradients from outside: their backward is captured.
    """

    inputs: tuple[InputFacts, ...]
    outputs: tuple[OutputFacts, ...]
    intermediate_bases: tuple[int, ...]
    tangents: tuple[int, ...]


def in_words(metadata: StepMetadata) -> str:
    """Formats the facts of a step, one line per tensor; omits those that are false."""
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
    """Returns the dimensions of symbolic size."""
    return frozenset(i for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt))
