"""The numbers of the host that a functional graph reads, and how they get there.

With ``tensor_scalars`` they are slots of one float64 block, a tensor; otherwise each is an input of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.functionalization.scalar_placement import ScalarPlan, is_scalar_node, is_unknown_size
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.graph.devices import accelerator_of
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.number_arguments import takes_size
from sidefx_train.errors import BackendError

aten = torch.ops.aten

_MADE_OF_NUMBER = (aten.scalar_tensor.default,)
_SAME_NUMBER = (aten._to_copy.default, aten.detach.default, aten.alias.default, aten.clone.default)


class NumberInputs:
    """Numbers of the host among the inputs of one functional graph.

    Attributes:
        nodes: those that tensor operations read, in graph order.
        packed: names of those in the block.
        slot_of: their places there.
        accelerator: where the block is, if the graph has one: kernels there read it.
        on_accelerator: operations that put numbers into tensors on the host which only the accelerator uses.
    """

    def __init__(self, traced: TracedGraph, plan: ScalarPlan, skip: Set[fx.Node], tensor_scalars: bool) -> None:
        self._traced, self._plan, self._skip = traced, plan, skip
        self.accelerator = accelerator_of(traced.module.graph)
        self.on_accelerator: set[fx.Node] = set()
        self.nodes = self._read()
        self.packed: list[str] = []
        self.slot_of: dict[fx.Node, int] = {}
        if tensor_scalars and self.nodes:
            self._place_on_one_device()
            self.packed = list(dict.fromkeys(plan.host.names[n] for n in self.nodes))
            self.slot_of = {n: self.packed.index(plan.host.names[n]) for n in self.nodes}

    def block(self) -> torch.Tensor | None:
        """Returns the block, a fake tensor; ``None`` if there are no numbers in it."""
        if not self.packed:
            return None
        with self._traced.fake_mode:
            return torch.empty(len(self.packed), dtype=torch.float64, device=self.accelerator or "cpu")

    def _read(self) -> list[fx.Node]:
        read: dict[fx.Node, None] = {}
        host = self._plan.host.names
        for node in self._traced.module.graph.nodes:
            if node.op != "call_function" or node in self._skip:
                continue
            if is_scalar_node(node) and node not in self._plan.late:
                continue
            for arg in node.all_input_nodes:
                if (arg in host and not isinstance(arg.meta.get("val"), (torch.SymInt, torch.SymBool, int))) or (
                    arg in host and self.computed_outside(arg)
                ):
                    read[arg] = None
        return list(read)

    def computed_outside(self, node: fx.Node) -> bool:
        """Returns True for an integer computed outside the graph: from a tensor's contents, or from a symbolic float.

        Sizes, of inputs or of results of such numbers, and numbers computed from sizes are not.
        """
        val = node.meta.get("val")
        known = (node in self._plan.host.names or node in self._plan.late) and node not in self._plan.sizes
        return known and isinstance(val, torch.SymInt) and (compat.is_unbacked(val) or compat.comes_from_float(val))

    def _place_on_one_device(self) -> None:
        if self.accelerator is None:
            return
        for node in self.nodes:
            for _, user in self._tensor_uses(node):
                value = user.meta.get("val")
                chain = _used_on(user, self.accelerator)
                if chain:
                    self.on_accelerator.update(chain)
                elif isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    reason = f"{user.target} on the CPU takes a number that changes from call to call, in a step on"
                    raise BackendError("SFX201", f"{reason} {self.accelerator}")

    def needed_in_graph(self, node: fx.Node) -> bool:
        """Returns False for numbers that only the host needs."""
        if is_unknown_size(node):
            return True
        if isinstance(node.meta.get("val"), torch.SymInt) and not self.computed_outside(node):
            return node not in self._plan.host.names or self._reaches_tensor(node)
        return node in self._plan.late and self._reaches_tensor(node)

    def _reaches_tensor(self, node: fx.Node) -> bool:
        return next(self._tensor_uses(node), None) is not None

    def becomes_size(self, node: fx.Node) -> bool:
        """Returns True for an integer of a tensor from which a size, or another number that selects elements, is
        computed.

        Without asserts on sizes, such a graph would not raise where eager's kernels do.
        """
        if not self._traced.asserts_sizes or not isinstance(node.meta.get("val"), torch.SymInt):
            return False
        return any(takes_size(user, number) for number, user in self._tensor_uses(node))

    def _tensor_uses(self, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yields the uses of a number, or of numbers computed from it, by tensor operations."""
        stack, seen = [(node, user) for user in node.users], set()
        while stack:
            number, user = stack.pop()
            if (number, user) in seen or user.op == "output" or user in self._skip:
                continue
            seen.add((number, user))
            if is_scalar_node(user):
                stack.extend((user, after) for after in user.users)
            else:
                yield number, user


def _used_on(node: fx.Node, device: torch.device) -> set[fx.Node]:
    """Returns the operations that put a number into a tensor on the host, if it is only used on a device; else an empty
    set. Kernels there take such a tensor as one of their own."""
    if node.target not in _MADE_OF_NUMBER or node.meta["val"].device.type != "cpu":
        return set()
    chain, waiting = {node}, [node]
    while waiting:
        made = waiting.pop()
        for user in made.users:
            values = [user.meta.get("val"), *(each.meta["val"] for each in written_args(user))]
            places = {value.device for value in values if isinstance(value, torch.Tensor)}
            if places == {device}:
                continue
            if user.target not in _SAME_NUMBER:
                return set()
            if user not in chain:
                chain.add(user)
                waiting.append(user)
    return chain
