"""Fake results are laid out like real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._decomp import meta_table
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from sidefx_train import torch_compat as compat

aten = torch.ops.aten


def columns(*shape: int) -> torch.Tensor:
    """Returns a tensor whose last dimension but one has stride 1."""
    return torch.rand(*shape).transpose(-1, -2).contiguous().transpose(-1, -2)


def rows(*shape: int) -> torch.Tensor:
    return torch.rand(*shape)


def images(*shape: int) -> torch.Tensor:
    return torch.rand(*shape).to(memory_format=torch.channels_last)


def both(op: Any) -> list[tuple[Any, ...]]:
    return [(op, columns(6, 5), rows(6, 5)), (op, rows(6, 1, 5), columns(6, 4, 5)), (op, columns(6, 5).int(), rows(5))]


def statistics(op: Any, *rest: Any) -> list[tuple[Any, ...]]:
    return [(op, x, None, None, *rest, 0.1, 1e-5) for x in (columns(3, 4, 5), images(3, 4, 5, 2), columns(3, 4, 5, 2))]


running = (torch.zeros(4), torch.ones(4))
CALLS: list[tuple[Any, ...]] = [
    *both(aten.copysign.Tensor),
    *both(aten.xlogy.Tensor),
    *both(aten.special_xlog1py.default),
    *both(aten.floor_divide.default),
    *(both(aten.logaddexp.default)[:2] + both(aten.heaviside.default)[:2]),
    *(both(aten.logical_and.default) + both(aten.logical_or.default) + both(aten.logical_xor.default)),
    *(both(aten.ldexp.Tensor)),
    *(
        (lambda a, b, way=way: aten.div.Tensor_mode(a, b, rounding_mode=way), columns(6, 5), rows(6, 5))
        for way in ("floor", None)
    ),
    (lambda a: aten.div.Scalar_mode(a, 2, rounding_mode="trunc"), columns(6, 5).int()),
    *((aten.pow.Scalar, base, columns(6, 5).to(kind)) for base in (2, 2.5) for kind in (torch.int32, torch.float32)),
    *((aten.pow.Scalar, 2, columns(6, 5) > 0), (aten.addr.default, columns(6, 5), rows(6), rows(5))),
    (lambda x, a, b: aten.addr(x, a, b, beta=0.0), columns(6, 5), rows(6), rows(5)),
    (aten.addr.default, rows(5), rows(6), rows(5)),
    *(
        (aten.baddbmm.default, x, columns(2, 3, 4), columns(2, 4, 5))
        for x in (columns(2, 3, 5), rows(2, 1, 5), rows(5))
    ),
    *((aten.addbmm.default, x, columns(2, 3, 4), columns(2, 4, 5)) for x in (columns(3, 5), rows(3, 1))),
    *((aten.binary_cross_entropy.default, columns(6, 5), rows(6, 5), None, way) for way in (0, 1)),
    (aten.native_dropout_backward.default, columns(6, 5), rows(6, 5) > 0.5, 2.0),
    (aten.mse_loss_backward.default, rows(6, 5), columns(6, 5), columns(6, 5), 0),
    *(
        (op, rows(6, 5), columns(6, 5), rows(6, 5), 0, 1.0)
        for op in (aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)
    ),
    (aten.log_sigmoid_forward.default, columns(6, 5)),
    *((aten.rrelu_with_noise.default, columns(6, 5), rows(6, 5), 0.1, 0.3, way) for way in (True, False)),
    *((aten.channel_shuffle.default, x, 2) for x in (images(2, 4, 3, 3), rows(2, 4, 3, 3))),
    (aten.native_channel_shuffle.default, images(2, 4, 3, 3), 2),
    (aten.max_unpool2d.default, images(1, 2, 2, 3), torch.arange(6).expand(1, 2, 6).reshape(1, 2, 2, 3), [3, 6]),
    *statistics(aten.native_batch_norm.default, *running, True),
    *statistics(aten.native_batch_norm.default, *running, False),
    *statistics(aten._native_batch_norm_legit.default, *running, True),
    *statistics(aten._native_batch_norm_legit.no_stats, True),
    *(
        (op, rows(6, 5), columns(6, 5), *numbers)
        for op, numbers in (
            (aten.hardswish_backward.default, ()),
            (aten.hardtanh_backward.default, (-1, 1)),
            (aten.logit_backward.default, (0.1,)),
            (aten._log_softmax_backward_data.default, (1, torch.float32)),
        )
    ),
    *(
        (op, columns(6, 5), rows(6, 5), *numbers)
        for op, numbers in ((aten.hardtanh_backward.default, (-1, 1)), (aten.hardswish_backward.default, ()))
    ),
    (aten._log_softmax_backward_data.default, columns(6, 5), rows(6, 5), 1, torch.float32),
    (aten.glu_backward.default, images(2, 3, 4, 5), images(2, 6, 4, 5), 1),
    (aten.binary_cross_entropy_backward.default, rows(6, 5), columns(6, 5), rows(6, 5), None, 0),
    (aten.normal.Tensor_Tensor, columns(6, 5), columns(6, 5)),
    (aten.nll_loss2d_forward.default, images(2, 3, 4, 5), images(2, 1, 4, 5)[:, 0].long(), None, 0, -100),
    (
        aten.native_layer_norm_backward.default,
        columns(6, 4, 5),
        columns(6, 4, 5),
        [4, 5],
        rows(6, 1, 1),
        rows(6, 1, 1),
        columns(4, 5),
        columns(4, 5),
        [True] * 3,
    ),
    *(
        (aten.native_batch_norm_backward.default, x, x, None, *running, *running, True, 1e-5, [True, False, False])
        for x in (columns(3, 4, 5), images(3, 4, 5, 2), columns(3, 4, 5, 2))
    ),
    (
        aten.batch_norm_backward.default,
        columns(3, 4, 5),
        columns(3, 4, 5),
        running[1],
        *running,
        *running,
        True,
        1e-5,
        [True, False, False],
        torch.zeros(0, dtype=torch.uint8),
    ),
    *((op, images(2, 3, 4, 5), [1] * 6) for op in (aten.reflection_pad3d.default, aten.replication_pad3d.default)),
    *(
        (op, columns(2, 3, 6, 7), images(2, 3, 4, 5), [1] * 4)
        for op in (aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default)
    ),
    *(
        (op, columns(2, 5, 6, 7), images(2, 3, 4, 5), [1] * 6)
        for op in (aten.reflection_pad3d_backward.default, aten.replication_pad3d_backward.default)
    ),
    *((aten._batch_norm_with_update.default, columns(3, 4, 5), running[1], running[0], *running, 0.1, 1e-5),),
]


def layouts(call: tuple[Any, ...], convert: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    function, *args = call
    made = function(*(convert(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
    parts = [part for part in (made if isinstance(made, tuple) else (made,)) if part is not None]
    return [(part.dtype, part.shape, part.stride()) for part in parts]


def of_fakes(call: tuple[Any, ...]) -> list[Any]:
    with FakeTensorMode() as mode:
        return layouts(call, mode.from_tensor)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: getattr(call[0], "name", lambda: "with named arguments")())
def test_fakes_are_laid_out_like_real_tensors(call):
    compat.know_layouts()
    assert of_fakes(call) == layouts(call, torch.clone)


def test_every_operator_is_called():
    named = {aten.div.Tensor_mode, aten.div.Scalar_mode}  # by functions that name the rounding mode
    assert set(compat.LAYOUTS) - {call[0] for call in CALLS} == named


def test_torch_still_lays_out_fakes_in_another_way(monkeypatch):
    compat.know_layouts()
    for op, kernel in compat.LAYOUTS.items():
        monkeypatch.delitem(fake_impls.op_implementations_dict, op)
        if meta_table.get(op) is kernel:
            monkeypatch.delitem(meta_table, op)
    FakeTensorMode.cache_clear()
    wrong = [call for call in CALLS if of_fakes(call) != layouts(call, torch.clone)]
    FakeTensorMode.cache_clear()
    assert wrong, "upstream has mended all: remove the workaround (torch_compat/fakes/layouts.py)"
