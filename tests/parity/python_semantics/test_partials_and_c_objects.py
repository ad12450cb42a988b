"""``functools.partial`` objects from outside, ``reduce`` of tensors, and immutable objects of C."""

from __future__ import annotations

import functools
import hashlib
import struct
import uuid
import zlib

import pytest
import torch
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel

import sidefx_train


def outcomes(step, change=lambda call: None, *, calls: int = 4) -> list:
    found = []
    for call in range(calls):
        found.append(step(torch.full((3,), call + 1.0)))
        change(call)
    return found


def scaled(factor, x, *, power=1):
    return x**power * factor


def compare(make, *, codes=frozenset()) -> None:
    """Compares results and the partial's state; ``make`` returns a partial, a step and what happens between calls."""
    states = []
    for wrap in (lambda step: step, lambda step: sidefx_train.compile(step, backend="eager", on_failure="eager")):
        partial, step, change = make()
        compiled = wrap(step)
        found = outcomes(compiled, change)
        states.append((found, partial.args, partial.keywords, vars(partial)))
    torch.testing.assert_close(states[1][0], states[0][0], rtol=0, atol=0)
    assert states[1][1:] == states[0][1:]
    report = compiled.report()
    assert {each.code for each in (*report.breaks, *report.fallbacks)} == set(codes)


def reads_attributes():
    partial = functools.update_wrapper(functools.partial(scaled, 2.0), scaled)
    partial.log, partial.factor = [], 3

    def step(x):
        partial.log.append(len(partial.log))
        return partial(x) * partial.factor * len(partial.__name__) * getattr(partial, "late", 1)

    def change(call):
        partial.factor += 1
        if call == 1:
            partial.late = 7

    return partial, step, change


def changes_keywords():
    partial = functools.partial(scaled, 2.0, power=1)

    def step(x):
        made = partial(x)
        partial.keywords["power"] += 1
        return made

    return partial, step, lambda call: None


def changes_state():
    partial = functools.partial(scaled, 2.0)

    def step(x):
        made = partial(x)
        partial.__setstate__((partial.func, (partial.args[0] + 1,), {}, None))
        return made

    return partial, step, lambda call: None


def reads_namespace():
    partial = functools.partial(scaled, 2.0)
    partial.factor = 3
    return partial, lambda x: partial(x) * vars(partial).get("factor", 7), lambda call: None


def test_attributes_of_a_partial():
    compare(reads_attributes)


@pytest.mark.parametrize("make", [changes_keywords, changes_state, reads_namespace])
def test_a_partial_that_is_changed_is_not_captured(make):
    """Regression: a change of its keywords or of its state was lost."""
    compare(make, codes={"SFX104"})


def test_reduce_begins_with_a_tensor():
    step = sidefx_train.compile(
        lambda x: functools.reduce(lambda a, b: a + b, [1, 2], x), backend="eager", fullgraph=True
    )
    assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))


def test_checksums_and_structs():
    packer = struct.Struct("<if")

    def function(x):
        digest = hashlib.sha256(packer.pack(3, 0.5)).digest()
        name = uuid.uuid5(uuid.NAMESPACE_DNS, "a")
        return x * packer.unpack(packer.pack(2, 0.5))[1], digest, zlib.crc32(b"a"), str(name)

    step = sidefx_train.compile(function, backend="eager", fullgraph=True)
    assert step(torch.ones(2))[1:] == function(torch.ones(2))[1:]
    assert torch.equal(step(torch.ones(2))[0], torch.full((2,), 0.5))


def test_constants_of_enumerations_in_c():
    chosen = [SDPBackend.MATH]

    def step(x):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, *chosen]):
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return y, chosen[0], SDPBackend.MATH in chosen, {chosen[0]: 1}

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    x = torch.randn(1, 2, 4, 8)
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        chosen[0] = backend
        (y, *others), (expected, *kept) = compiled(x), step(x)
        assert torch.equal(y, expected) and others == kept and others[0] is backend
    assert len(compiled.report().captures) == 2


def test_arguments_of_attention_that_leave_the_step():
    compiled = sidefx_train.compile(
        lambda x: SDPAParams(x, x + 1, x, None, 0.25, True, False), backend="eager", fullgraph=True
    )
    x = torch.randn(2, 4, 3)
    for _ in range(2):
        made = compiled(x)
        assert type(made) is SDPAParams and made.query is x and torch.equal(made.key, x + 1)
        assert (made.attn_mask, made.dropout, made.is_causal) == (None, 0.25, True)
