"""Hooks of tensors, of nodes of the autograd graph, and of optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import _HookMixin
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.optim import optimizer as optimizer_module


def hooks_of(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The dicts of a tensor's hooks and of its post-accumulate-grad hooks, each ``None`` if it never had one."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def hook_numbers(tensor: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Under which numbers a tensor has hooks, of both kinds."""
    return tuple(tuple(hooks or ()) for hooks in hooks_of(tensor))


class _Asked(Exception):
    """Leaves torch's registration of a hook before it changes anything."""


class _NodeHooks:
    """Hooks that were registered on nodes of the autograd graph.

    Torch's C++ registers them by a static method of Python, with the dict that holds those a node has: it tells when
    there are new ones, and which there are.

    Attributes:
        registered: how often any were registered.
    """

    def __init__(self) -> None:
        self.registered = 0
        self._method: Any = None

    def listen(self) -> None:
        """Counts registrations from now on."""
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

    def of_leaf(self, leaf: torch.Tensor) -> tuple[Any, Any]:
        """The dicts of hooks before and after the node that accumulates a leaf's gradient; ``None`` without any."""
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
    """The node of the autograd graph that accumulates a leaf's gradient."""
    with disable_proxy_modes_tracing(), torch.inference_mode(False), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(leaf).node


class AccumulationHooks:
    """Which of some leaves have hooks at the nodes that accumulate their gradients; called as a guard.

    Args:
        leaves: the leaves.
        others: there are others, of which nothing is known once hooks have been registered.
    """

    __name__ = "accumulation_hooks"

    def __init__(self, leaves: list[torch.Tensor], others: bool) -> None:
        self.leaves = leaves
        self.others = others
        self.seen = -1
        self.hooked: list[torch.Tensor] = []
        self.known: tuple[int, ...] = ()

    def __call__(self) -> tuple[int, ...]:
        """Identities of the dicts that hold the hooks."""
        if self.seen != node_hooks.registered:
            found = [(leaf, self._of(leaf)) for leaf in self.leaves]
            self.hooked = [leaf for leaf, dicts in found if dicts != (0, 0)]
            self.seen = node_hooks.registered
            registered = (self.seen,) if self.others else ()
            self.known = (*registered, *(number for _, dicts in found for number in dicts))
        elif self.hooked and not all(map(any, map(self._of, self.hooked))):  # a node has died, its hooks with it
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
    """The class in C++ that reduces gradients between processes, where this torch has it."""
    return getattr(torch.distributed, "Reducer", None)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if something is called before or after an optimizer's ``step``."""
    found = optimizer_module._global_optimizer_pre_hooks or optimizer_module._global_optimizer_post_hooks
    return bool(found or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def tensor_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """A copy of a tensor's backward hooks."""
    return dict(tensor._backward_hooks or {})


def set_tensor_hooks(tensor: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Makes ``hooks`` the hooks of a tensor that has had some; their handles go on working."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks.clear()
        tensor._backward_hooks.update(hooks)
