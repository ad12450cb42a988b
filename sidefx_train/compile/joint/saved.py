"""The order in which eager looks at what it saved for a backward: it complains of the first that was changed since."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.artifacts import DERIVED, FORWARD
from sidefx_train.compile.graphs import schema_args

_NODE = re.compile(r"(.*?)Backward\d*$")


def in_eager_order(reads: list[tuple[fx.Node, list[fx.Node]]], forward: Iterable[fx.Node]) -> list[fx.Node]:
    """Values of the forward that a backward reads.

    A node of the autograd graph looks at all that it saved before it computes anything: at arguments by their names,
    then at results.

    Args:
        reads: nodes of the backward, and what each reads of the forward, in the order of the forward.
        forward: nodes of the forward.
    """
    made_by: dict[str, list[fx.Node]] = {}
    for node in forward:
        if isinstance(node.target, compat.OpOverload):
            made_by.setdefault(_bare(node.target._schema.name.split("::")[1]), []).append(node)
    found: list[fx.Node] = []
    for derived, group in itertools.groupby(reads, key=lambda read: read[0].meta.get(DERIVED)):
        used = list(dict.fromkeys(itertools.chain.from_iterable(each for _, each in group)))
        name = _NODE.match(derived[0]) if derived is not None else None
        makers = made_by.get(_bare(name[1]), []) if name is not None and len(used) > 1 else []
        fitting = [node for node in makers if set(used) <= {node, *node.all_input_nodes}]
        fitting.sort(key=lambda node: node.meta.get(FORWARD) != derived[1])  # type: ignore[index]
        maker = fitting[0] if fitting else None
        if maker is not None:
            names = {value: argument.name for argument, value in schema_args(maker) if isinstance(value, fx.Node)}
            used.sort(key=lambda value: (value not in names, names.get(value, "")))
        found += used
    return found


def _bare(name: str) -> str:
    """A name as operators and nodes of the autograd graph share it."""
    return name.replace("_", "").lower()
