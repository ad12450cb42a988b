"""Hooks of tensors, autograd nodes and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import _HookMixin
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.optim import optimizer as optimizer_module

from sidefx_train.torch_compat.transforms import outside_transforms
from sidefx_train.torch_compat.wrapper_tensors import is_wrapper, node_of_leaf


def hooks_of(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Returns the dicts of a tensor's hooks and of its post-accumulate-grad hooks, each ``None`` if it never had
    one."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def hook_numbers(tensor: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Returns the numbers of a tensor's hooks, of both kinds."""
    return tuple(tuple(hooks or ()) for hooks in hooks_of(tensor))


class _Asked(Exception):
    """Leaves torch's registration of a hook before it changes anything."""


class _NodeHooks:
    """Hooks that were registered on autograd nodes.

    Torch's C++ registers them through a static Python method, with the dict of the node's hooks: the method detects new
    ones, and reads existing ones.

    Attributes:
        registered: number of registrations.
    """

    def __init__(self) -> None:
        self.registered = 0
        self._method: Any = None

    def listen(self) -> None:
        """Starts counting registrations."""
        if self._method is None:
            method = self._method = _HookMixin._register_hook

            def register(hooks: Any, hook: Any) -> Any:
                if type(hook) is list:
                    hook.append(hooks)
                    raise _Asked
                if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:  # not on a shadow
                    self.registered += 1
                return method(hooks, hook)

            _HookMixin._register_hook = staticmethod(register)  # type: ignore[method-assign]

    def register_on_function(self, node: Any, name: str, hook: Any) -> Any:
        """Registers a hook on the node of a custom function, which accumulates no gradient: it is not counted."""
        before = self.registered
        try:
            return getattr(node, name)(hook)
        finally:
            self.registered = before

    def of_leaf(self, leaf: torch.Tensor) -> tuple[Any, Any]:
        """Returns the dicts of a leaf's hooks before and after its ``AccumulateGrad`` node; ``None`` without any."""
        self.listen()
        node = accumulator_of(leaf)
        found: list[Any] = []
        for register in (node.register_prehook, node.register_hook):
            try:
                register(found)
            except _Asked:
                pass
        return found[0] or None, found[1] or None


node_hooks = _NodeHooks()


def accumulator_of(leaf: torch.Tensor) -> Any:
    """Returns the ``AccumulateGrad`` node of a leaf."""
    with outside_transforms(), disable_proxy_modes_tracing(), torch.inference_mode(False), torch.enable_grad():
        if is_wrapper(leaf):
            return node_of_leaf(leaf)
        return torch.autograd.graph.get_gradient_edge(leaf).node


def accumulates(leaf: torch.Tensor) -> bool:
    """Returns False for a view of a leaf that was made in ``no_grad`` mode: torch calls it a leaf that requires a
    gradient, but gives it none."""
    with outside_transforms(), disable_proxy_modes_tracing(), torch.inference_mode(False), torch.enable_grad():
        try:
            view = leaf.view_as(leaf)
        except RuntimeError:  # its base was written since, with gradients
            return False
        return view.grad_fn is not None and view.grad_fn.next_functions[0][0] is not None


class AccumulationHooks:
    """Guard on hooks of the ``AccumulateGrad`` nodes of some leaves.

    Args:
        leaves: the leaves.
        others: there are other leaves, whose hooks are unknown once any were registered.
    """

    __name__ = "accumulation_hooks"

    def __init__(self, leaves: list[torch.Tensor], others: bool) -> None:
        self.leaves = leaves
        self.others = others
        self.seen = -1
        self.hooked: list[torch.Tensor] = []
        self.known: tuple[int, ...] = ()

    def __call__(self) -> tuple[int, ...]:
        """Returns the identities of the dicts with the hooks."""
        if self.seen != node_hooks.registered:
            found = [(leaf, self._of(leaf)) for leaf in self.leaves]
            self.hooked = [leaf for leaf, dicts in found if dicts != (0, 0)]
            self.seen = node_hooks.registered
            registered = (self.seen,) if self.others else ()
            self.known = (*registered, *(number for _, dicts in found for number in dicts))
        elif self.hooked and not all(map(any, map(self._of, self.hooked))):  # a node was destroyed with its hooks
            self.seen = -1
            return self()
        return self.known

    @staticmethod
    def _of(leaf: torch.Tensor) -> tuple[int, int]:
        if not leaf.requires_grad or leaf.grad_fn is not None:
            return 0, 0
        before, behind = node_hooks.of_leaf(leaf)
        return (0 if before is None else id(before)), (0 if behind is None else id(behind))


def gradient_reducer() -> type | None:
    """Returns the C++ class that reduces gradients between processes, if this torch has it."""
    return getattr(torch.distributed, "Reducer", None)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if an optimizer has hooks before or after its ``step``."""
    found = optimizer_module._global_optimizer_pre_hooks or optimizer_module._global_optimizer_post_hooks
    return bool(found or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def tensor_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Returns a copy of a tensor's backward hooks."""
    return dict(tensor._backward_hooks or {})


def set_tensor_hooks(tensor: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Replaces the hooks of a tensor that has had some; their handles stay valid."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks.clear()
        tensor._backward_hooks.update(hooks)
