"""Random programs over views and in-place operations: which tensors alias, before, in and after a captured function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.fuzz.alias_run import Flat, Same

_HEADER = """import torch
from tests.fuzz.alias_run import Flat, Same, attempt
"""

INPUTS = (
    "torch.arange(12.0).reshape(3, 4).sin()",
    "torch.arange(12.0).reshape(3, 4).sin().t()",
    "torch.arange(24.0).cos()[6:18].view(3, 4)",
    "torch.arange(12.0).reshape(3, 4).sin().requires_grad_()",
    "torch.arange(12.0).reshape(3, 4).cos().requires_grad_()",
    "torch.arange(12.0).reshape(3, 4).cos().requires_grad_() * 1.5",
    "torch.arange(4.0).cos()",
    "torch.tensor(1.5)",
    "torch.tensor([1e8, torch.inf, -3.0, -0.0, -torch.inf, 1e-8] * 2).reshape(3, 4)",
    "torch.tensor([1e8, torch.inf, -3.0, -0.0, -torch.inf, 1e-8] * 2).reshape(4, 3).requires_grad_()",
)
"""Expressions for new arguments."""

DERIVED = (
    "{0}",
    "{0}.detach()",
    "{0}[0]",
    "{0}[1:]",
    "{0}.view(-1)",
    "{0}.t()",
    "{0}.unsqueeze(0)",
    "{0}.reshape(-1)[2:7]",
    "{0}.reshape(-1)[1:6]",
    "{0}.unsafe_split(2)[0]",
    "{0}.data",
)
"""Arguments that share memory with another argument."""

TWISTED = ("{0}.view(torch.int32)", "{0}.detach().view(torch.uint8)", "torch.view_as_complex({0}.detach().view(-1, 2))")

VIEWS = (
    "{0}.t()", "{0}[0]", "{0}[1:]", "{0}[..., :2]", "{0}.view(-1)", "{0}.unsqueeze(0)", "{0}.squeeze()", "{0}.detach()",
    "{0}.transpose(0, -1)", "{0}.flatten()", "{0}.reshape(-1)", "{0}.narrow(0, 0, 1)", "{0}.split(2)[0]",
    "{0}.chunk(2, -1)[1]", "{0}.unbind(0)[0]", "{0}.expand(2, *{0}.shape)", "{0}.diagonal()", "{0}.unfold(0, 2, 1)",
    "{0}.as_strided((2,), (1,))", "{0}.view_as({0})", "{0}.movedim(0, -1)", "{0}.data", "{0}.T", "{0}.contiguous()",
    "{0}.view(torch.int32)", "torch.view_as_complex({0}.reshape(-1, 2))", "{0}.conj()", "{0}.real", "{0}.imag",
    "torch.view_as_real({0})", "{0}[::2]", "{0}.unsafe_split(2)[0]", "{0}.permute(*reversed(range({0}.dim())))",
    "Flat.apply({0})", "Same.apply({0})", "torch.view_as_complex({0}.reshape(-1, 2)).conj()", "torch._neg_view({0})",
    "{0}.resolve_conj()", "{0}.resolve_neg()", "{0}.view(torch.uint8)", "{0}.swapaxes(0, -1)",
    "{0}.unflatten(0, (1, -1))", "{0}.expand({0}.shape)", "{0}.expand(1, *{0}.shape)", "{0}.unfold(-1, 1, 2)",
    "{0}.unfold(0, 2, 2)",
)  # fmt: skip

VALUES = (
    "{0} * 2", "{0}.sin()", "{0} + {1}", "{0}.clone()", "{0} * {1}", "{0}.sum()", "torch.zeros(3, 4)", "{0}.exp()",
    "torch.cat([{0}.reshape(-1), {1}.reshape(-1)])", "torch.where({0} > 0, {0}, {1})", "{0}.to(torch.float64)",
    "torch.empty(3, 4).fill_(2.0)", "{0}.relu()", "{0}.max()", "torch.stack([{0}, {0}])", "{0}.clone().detach()",
)  # fmt: skip

WRITES = (
    "{0}.mul_(2)", "{0}.add_(1)", "{0}.copy_({1})", "{0}.zero_()", "{0}.add_({1})", "{0}.sin_()", "{0}[0] = 3",
    "{0}.neg_()",
    "{0}[..., 0] += 1", "{0}.fill_(0.5)", "torch.sin({1}, out={0})", "{0}.mul_({1})", "{0}.relu_()",
    "{0}.detach().add_(1)",
    "{0}.data.mul_(2)", "{0}.lerp_({1}, 0.5)",
    "{0}.exp_()", "{0}.index_fill_(0, torch.tensor([0]), 2.0)", "{0}.masked_fill_({0} > 0, -1.0)",
    "torch._foreach_add_([{0}, {1}], 1)", "torch._foreach_add_([{0}], [{1}])",
)  # fmt: skip

TURNS = ("{0}.t_()", "{0}.unsqueeze_(0)", "{0}.squeeze_()", "{0}.transpose_(0, -1)", "{0}.as_strided_((2,), (1,))")
RARE = (
    "{0}.requires_grad_()",
    "{0}.detach_()",
    "{0}.resize_({0}.numel() // 2)",
    "{0}.resize_(5, 4).fill_(1.5)",
    "{0}.resize_as_({1}) if {0}.is_contiguous() and {1}.numel() <= {0}.numel() else {0}.resize_as_({1}).fill_(1.5)",
    "{0}.set_({1})",
    "{0}.data = {1}",
    "{0}.data = {1}.clone()",
    "{0}.set_({1}.clone())",
)


def generate(draw: Callable[[int], int]) -> str:
    """Returns the source of a program; ``draw(n)`` returns a number below ``n``.

    The program is run while it is written: a statement that raises is sometimes kept, and is then the last one.
    """
    tensors: dict[str, Any] = {"torch": torch, "Flat": Flat, "Same": Same}
    lines = [_HEADER, "def build():"]
    names: list[str] = []
    while not names or draw(3):
        kinds = INPUTS if not names or draw(2) else TWISTED if not draw(6) else DERIVED
        line = f"x{len(names)} = {kinds[draw(len(kinds))].format(names[draw(len(names))] if names else '')}"
        if _runs(line, tensors):
            names.append(f"x{len(names)}")
            lines.append("    " + line)
        if len(names) == 4:
            break
    lines.append(f"    return {', '.join(names)},\n")
    lines.append(f"def step({', '.join(names)}):")
    known, body, ended = list(names), [], False
    for number in range(2 + draw(12)):
        made = _statement(draw, known, f"v{number}")
        if _runs("\n".join(made), tensors):
            known += [f"v{number}"] if f"v{number}" in tensors else []
        elif draw(12):
            continue
        else:
            ended = True
        body += ["    " + line for line in made]
        if ended:
            break
    lines += body
    count = 1 + draw(4)
    outs = [known[-1 - draw(min(len(known), 5))] for _ in range(count)]
    lines.append(f"    return {', '.join(outs)},\n")
    lines.append(f"def after(outs, {', '.join(names)}):")
    told = [*(f"outs[{i}]" for i in range(count)), *names]
    for _ in range(draw(4)):
        text = (VIEWS, WRITES, WRITES, TURNS)[draw(4)]
        line = text[draw(len(text))].format(told[draw(len(told))], told[draw(len(told))])
        kind = "exec" if "=" in line.replace("out=", "") else "eval"
        lines.append(f"    attempt({line!r}, {kind!r}, outs, {{{', '.join(f'{n!r}: {n}' for n in names)}}})")
    lines.append("    return outs")
    return "\n".join(lines)


def _runs(code: str, tensors: dict[str, Any]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, tensors)
    except Exception:
        return False
    return True


def _statement(draw: Callable[[int], int], known: list[str], name: str) -> list[str]:
    kind = draw(24)
    one, two = known[-1 - draw(min(len(known), 6))], known[draw(len(known))]
    if kind < 10:
        line = f"{name} = {VIEWS[draw(len(VIEWS))].format(one, two)}"
    elif kind < 14:
        line = f"{name} = {VALUES[draw(len(VALUES))].format(one, two)}"
    elif kind < 22:
        line = WRITES[draw(len(WRITES))].format(one, two)
    elif kind < 23 or draw(3):
        line = TURNS[draw(len(TURNS))].format(one, two)
    else:
        line = RARE[draw(len(RARE))].format(one, two)
    return ["with torch.no_grad():", f"    {line}"] if not draw(8) else [line]
