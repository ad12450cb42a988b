"""Hooks that leaves have at entry: of the tensors, and of the autograd nodes that accumulate their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


def carry_hooks(heap: ShadowTableAPI, real: torch.Tensor, fake: torch.Tensor, record: Any) -> None:
    """Copies the hooks that a leaf has at entry to its shadow."""
    record.carried = ({}, {})
    for carried, name, register in zip(
        record.carried,
        ("_backward_hooks", "_post_accumulate_grad_hooks"),
        (fake.register_hook, fake.register_post_accumulate_grad_hook),
        strict=True,
    ):
        source = heap.sources.slot(record.source, name)
        hooks = heap.shadow(getattr(real, name), source)
        entries = heap.dict_record(hooks) if hooks is not None else None
        if entries is not None:
            entries.fill()
            for key, hook in hooks.items():
                carried[register(heap.reenter(hook)).id] = hooks, key
    record.hooks = compat.hook_numbers(fake)


def carry_accumulation_hooks(heap: ShadowTableAPI, real: torch.Tensor, fake: torch.Tensor, record: Any) -> None:
    """Copies the hooks of a leaf's ``AccumulateGrad`` node to that of its shadow."""
    heap.leaves.append(record)
    with compat.real_world():
        before, behind = compat.node_hooks.of_leaf(real)
    if before is None and behind is None:
        return
    record.accumulator_hooked = True
    node = compat.accumulator_of(fake)
    heap.accumulators.append(node)  # its tensor does not keep it alive
    for dicts, register in ((before, node.register_prehook), (behind, node.register_hook)):
        if dicts is not None:
            label = f"the hooks of the node that accumulates {record.source.label}.grad"
            shadow = heap.shadow(dicts, heap.sources.const(dicts, label))
            hooks = heap.dict_record(shadow)
            assert hooks is not None, "hooks are in a dict"
            hooks.fill()
            for hook in shadow.values():
                register(heap.reenter(hook))


def guard_accumulation_hooks(heap: ShadowTableAPI) -> None:
    """Guards the hooks of ``AccumulateGrad`` nodes."""
    if heap.leaves:
        held = [record.real for record in heap.leaves if record.kind == "static"]
        asked = compat.AccumulationHooks(held, others=len(held) < len(heap.leaves))
        with compat.real_world():
            hooks = asked()
        source = heap.sources.call(heap.sources.const(asked, "the hooks of nodes that accumulate gradients"))
        heap.guard("equal", source, hooks)
