"""Arguments that stop requiring gradients in a step, are changed after that, and are returned as views."""

from __future__ import annotations

import pytest

from tests.fuzz.alias_run import check

LEAF = "torch.arange(12.0).reshape(3, 4).sin().requires_grad_()"
CEASES = {"leaf": (LEAF, "x.requires_grad_(False)"), "leaf by attribute": (LEAF, "x.requires_grad = False")}
CEASES |= {"leaf detached": (LEAF, "x.detach_()"), "result detached": (f"{LEAF} * 1.5", "x.detach_()")}
THEN = {
    "nothing": "pass",
    "written": "x.mul_(2)",
    "enlarged": "x.resize_(5, 4).fill_(1.5)",
    "made smaller": "x.resize_(2, 4)",
    "transposed in place": "x.t_()",
    "unsqueezed in place": "x.unsqueeze_(0)",
    "strided": "x.as_strided_((2, 2), (4, 1))",
    "storage replaced": "x.data = w.detach().clone()",
    "storage replaced by set_": "x.set_(w.detach().clone())",
    "storage of another": "x.data = w.detach()",
    "requires them again": "x.mul_(2); x.requires_grad_()",
}
OUTS = {
    "itself": "x,",
    "a view": "x.expand(2, *x.shape),",
    "detached": "x.detach(), x.data",
    "with gradients": "x.view_as(x), (w * x.sum()).sum()",
    "a view from before": "v, x.view_as(x)",
    "a detached one from before": "d, x.view_as(x)",
}
LEFT = {"a view from before": "result detached"}
"""Views that exist before and have an autograd history run eagerly."""


def source(made: str, ceases: str, then: str, outs: str) -> str:
    return (
        "import torch\nfrom tests.fuzz.alias_run import attempt\n"
        f"def build():\n    x = {made}\n    w = {LEAF}\n    return x, w\n"
        f"def step(x, w):\n    v = x[0]\n    d = x.detach()\n    {ceases}\n    {then}\n    return {outs}\n"
        "def after(outs, x, w):\n    attempt('outs[0].add_(1)', 'eval', outs, {})\n"
        "    attempt('x.view(-1)', 'eval', outs, {'x': x})\n"
    )


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("outs", OUTS)
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("how", CEASES)
@pytest.mark.covering(1)
def test_as_in_eager(how, then, outs):
    check(source(*CEASES[how], THEN[then], OUTS[outs]))


@pytest.mark.parametrize("then", ["nothing", "written", "enlarged", "transposed in place", "storage replaced"])
@pytest.mark.parametrize("how", CEASES)
def test_captured(how, then):
    if "result" in how and then == "transposed in place":
        pytest.skip("what has a history outside is detached and transposed by eager")
    assert check(source(*CEASES[how], THEN[then], OUTS["a view"])).replays == 3
