"""Compares with eager every way to change an argument, for every kind of argument, and for arguments in one memory."""

from __future__ import annotations

import pytest

from tests.fuzz.alias_run import check, source_of

_X, _W = "torch.arange(12.0).reshape(3, 4).sin()", "w = torch.arange(12.0).reshape(3, 4).cos().requires_grad_()"
KINDS = {
    "a leaf": f"x = {_X}",
    "a leaf with gradients": f"x = {_X}.requires_grad_()",
    "a result": f"x = {_X}.requires_grad_() * 1.5",
    "a view": "b = torch.arange(24.0).cos(); x = b[6:18].view(3, 4)",
    "a view of a result": "b = torch.arange(24.0).cos().requires_grad_() * 1; x = b[6:18].view(3, 4)",
}
CHANGES = (
    "x.t_()", "x.squeeze_()", "x.unsqueeze_(0)", "x.transpose_(0, 1)", "x.as_strided_((2, 2), (4, 1))",
    "x.resize_(4, 3)", "x.resize_(2, 2)", "x.resize_(5, 4).fill_(1.5)", "x.resize_as_(w.detach()[:2])",
    "x.set_(w.detach().clone())", "x.set_(w.detach().clone().untyped_storage(), 0, (3, 4), (4, 1))", "x.set_()",
    "x.data = w.detach().clone()", "x.data = w.detach()[:2]", "x.requires_grad_()", "x.requires_grad_(False)",
    "x.requires_grad = True", "x.detach_()", "x.mul_(2)", "x.mul_(w)",
)  # fmt: skip
RESULTS = ("x.view_as(x),", "(x.sum() * w).sum(), x")
LATER = "attempt('outs[0].add_(1)', 'eval', outs, {})\nattempt('x.add_(1)', 'eval', outs, {'x': x})"

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.covering(1)
def test_changed(kind, change):
    for before in ("", "x.mul_(2); ", "x.mul_(w); "):
        for result in RESULTS:
            check(source_of((f"{KINDS[kind]}; {_W}", f"{before}{change}; return {result}", LATER)))


_B, _C = "b = torch.arange(24.0).sin()", "torch.complex(torch.arange(6.0), torch.arange(6.0).sin())"
SHARED = {
    "the same tensor": f"x = {_X}; y = x",
    "the same result": f"x = {_X}.requires_grad_() * 1; y = x",
    "a part": f"x = {_X}; y = x[1:]",
    "parts that overlap": f"{_B}; x = b[0:12].view(3, 4); y = b[4:16].view(3, 4)",
    "parts of a result": f"{_B}.requires_grad_() * 1; x = b[0:12].view(3, 4); y = b[4:16].view(3, 4)",
    "transposed": f"x = {_X}; y = x.t()",
    "detached": f"x = {_X}.requires_grad_() * 1; y = x.detach()",
    "data": f"x = {_X}; y = x.data",
    "integers": f"x = {_X}; y = x.view(torch.int32)",
    "bytes": f"x = {_X}; y = x.view(torch.uint8)",
    "doubles": f"x = {_X}; y = x.view(torch.float64)",
    "complex": f"x = {_X}; y = torch.view_as_complex(x.view(-1, 2))",
    "the real part": f"y = {_C}; x = y.real",
    "a conjugate": f"x = {_C}; y = x.conj()",
    "a negative": f"x = {_X}; y = torch._neg_view(x)",
    "the imaginary part of a conjugate": f"x = {_C}; y = x.conj().imag",
    "expanded": "x = torch.arange(4.0); y = x.expand(3, 4)",
    "parts that do not overlap": "b = torch.arange(24.0).view(6, 4); x = b[:, 0]; y = b[:, 1]",
    "a storage": f"x = {_X}; y = torch.empty(0).set_(x.untyped_storage(), 2, (2, 2), (1, 3))",
}
WRITES = (
    "x.mul_(2)", "y.mul_(2)", "y.zero_()", "x.add_(w.sum())", "y.add_(w.sum())", "y.mul_(2); x.add_(1); y.neg_()",
    "x.detach().add_(1)", "y.data.add_(1)", "x.unsqueeze_(0); x.mul_(2)", "x.mul_(2); y.unsqueeze_(0)",
)  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.covering(1)
def test_in_one_memory(name, write):
    for result in ("x, y", "(y * 1.0).sum() * w.sum(), x"):
        check(source_of((f"{SHARED[name]}; {_W}", f"{write}; return {result}", LATER)))
