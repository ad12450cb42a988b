"""oneDNN's recurrent layers as composite operators.

On CPU ``nn.LSTM`` runs as one oneDNN call forward and one backward, linked by a workspace whose size only oneDNN knows;
the operator's own meta function reports zero bytes. Compilers that trust it fail or decompose into a loop of small
products. The two operators here are the same calls under this library's names, with the workspace's true size; their
arguments are only tensors and numbers, so that the C++ wrapper of a graph can call them.
"""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

_FORWARD = (
    "rnn_layer(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor hx, Tensor cx, bool reverse,"
    " int mode, int hidden_size, int num_layers, bool has_biases, bool bidirectional,"
    " bool batch_first, bool train, int workspace) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "rnn_layer_backward(Tensor input, Tensor w1, Tensor w2, Tensor w3, Tensor w4, Tensor hx, Tensor cx, Tensor output,"
    " Tensor hy, Tensor cy, Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, bool reverse, int mode,"
    " int hidden_size, int num_layers, bool has_biases, bool train, bool bidirectional,"
    " bool batch_first, Tensor workspace) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


_SIZES, _SIZES_BACKWARD = 8, 20
"""Positions of the sizes of packed sequences in the arguments of torch's operators."""


_BIASES = 3, 4
"""Positions of the gradients of the two biases among the results."""


def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    with compat.training_kernels():  # without grad mode oneDNN keeps no workspace
        output, hy, cy, workspace = aten.mkldnn_rnn_layer.default(*args[:_SIZES], [], *args[_SIZES:-1])
    return output, hy, cy, torch.empty(0, dtype=torch.uint8) if workspace is None else workspace


def _forward_fake(*args: Any) -> tuple[torch.Tensor, ...]:
    output, hy, cy, _ = aten.mkldnn_rnn_layer.default(*args[:_SIZES], [], *args[_SIZES:-1])
    return output, hy, cy, args[0].new_empty(args[-1], dtype=torch.uint8)


def _backward(*args: Any) -> tuple[torch.Tensor, ...]:
    made = list(aten.mkldnn_rnn_layer_backward.default(*args[:_SIZES_BACKWARD], [], *args[_SIZES_BACKWARD:]))
    made[_BIASES[1]] = made[_BIASES[0]].clone()  # oneDNN returns one tensor for both, and autograd would copy it
    return tuple(made)


define_operator(_FORWARD, _forward, _forward_fake)
define_operator(_BACKWARD, _backward, _backward)


def workspace_bytes(args: tuple[Any, ...]) -> int:
    """Returns the bytes of a forward call's workspace, found by calling it on zeros."""
    with compat.outside_tracing(), compat.training_kernels():
        zeros = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        workspace = aten.mkldnn_rnn_layer.default(*zeros)[3]
    return 0 if workspace is None else workspace.numel()


def forward(*args: Any) -> Any:
    """Replaces ``aten.mkldnn_rnn_layer`` in a functional graph."""
    if args[_SIZES]:  # packed sequences, which torch does not pass to oneDNN
        return aten.mkldnn_rnn_layer.default(*args)
    numbers = (*args[:_SIZES], *args[_SIZES + 1 :])
    return torch.ops.sidefx.rnn_layer.default(*numbers, workspace_bytes(args))


def backward(*args: Any) -> Any:
    """Replaces ``aten.mkldnn_rnn_layer_backward`` in a functional graph."""
    if args[_SIZES_BACKWARD]:
        return aten.mkldnn_rnn_layer_backward.default(*args)
    return torch.ops.sidefx.rnn_layer_backward.default(*args[:_SIZES_BACKWARD], *args[_SIZES_BACKWARD + 1 :])
