"""Estimates the amount of work of a step, which determines how to run it."""

from __future__ import annotations

from torch import fx

_TINY_PRODUCT = 1_000_000  # floating-point operations of one product
_TINY_TENSOR = 32_768  # elements
_HEAVY = ("convolution", "attention", "bmm", "rnn", "mkldnn", "trilinear", "grid_sampler", "linalg")


def product_flops(node: fx.Node) -> int | None:
    """Returns the floating-point operations of a matrix product, ``None`` if sizes are symbolic."""
    left, right = (a.meta["val"].shape for a in node.args[-2:])  # type: ignore[union-attr]
    sizes = (left[-2], left[-1], right[-1])
    return 2 * sizes[0] * sizes[1] * sizes[2] if all(isinstance(s, int) for s in sizes) else None


def is_tiny(module: fx.GraphModule) -> bool:
    """Returns True if a second thread would not help: every operation takes a few microseconds."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        name = str(node.target)
        if any(word in name for word in _HEAVY):
            return False
        if name.startswith(("aten.mm", "aten.addmm")):
            flops = product_flops(node)
            if flops is None or flops > _TINY_PRODUCT:
                return False
        val = node.meta.get("val")
        if hasattr(val, "numel") and (not isinstance(val.numel(), int) or val.numel() > _TINY_TENSOR):
            return False
        if hasattr(val, "device") and val.device.type != "cpu":
            return False
    return True
