"""Annotations of functions that a step creates and hands out; from Python 3.14 on they are computed when read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sidefx_train

SOURCE = """
def step(x, log, read):
    bound = float
    def made(a: int, b: bound = 2) -> list[int]:
        return a + b
    if read:
        made.__annotations__["more"] = str
    log.append(made)
    return x * 2
"""


@pytest.mark.parametrize("read", [False, True], ids=["unread", "changed"])
def test_annotations_of_a_function_that_leaves_the_step(read: bool) -> None:
    space: dict[str, Any] = {}
    exec(compile(SOURCE, "<annotations>", "exec", dont_inherit=True), space)
    compiled = sidefx_train.compile(space["step"], backend="eager")
    for _ in range(2):
        made: list[Any] = []
        for run in (space["step"], compiled):
            run(torch.ones(2), made, read)
        plain, captured = made
        if not read and hasattr(plain, "__annotate__"):
            assert captured.__annotate__.__qualname__ == plain.__annotate__.__qualname__
            assert captured.__annotate__.__closure__[0].cell_contents is float
        assert captured.__annotations__ == plain.__annotations__
        assert captured(1) == 3
    assert compiled.report().replays == 2


@pytest.mark.skipif(not hasattr(pytest.fixture, "__annotate__"), reason="annotations are computed at once")
def test_annotations_that_cannot_be_computed_yet() -> None:
    space: dict[str, Any] = {}
    source = SOURCE.replace("list[int]", "later")
    exec(compile(source, "<annotations>", "exec", dont_inherit=True), space)
    compiled = sidefx_train.compile(space["step"], backend="eager")
    made: list[Any] = []
    compiled(torch.ones(2), made, False)
    with pytest.raises(NameError, match="later"):
        made[0].__annotations__  # noqa: B018
    space["later"] = int
    assert made[0].__annotations__["return"] is int
    assert compiled.report().replays == 1
