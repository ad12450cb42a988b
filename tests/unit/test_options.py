"""All functions have the same options and defaults."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import sidefx_train
from sidefx_train.compile.api import compile_step
from sidefx_train.config import CompileConfig

OPTIONS = {field.name: field.default for field in fields(CompileConfig)}


@pytest.mark.parametrize(
    ("function", "others"),
    [(compile_step, {}), (sidefx_train.SideFXCompile.__init__, {"warmup": "background"})],
    ids=["compile", "SideFXCompile"],
)
def test_defaults(function, others):
    given = {name: each.default for name, each in inspect.signature(function).parameters.items() if name in OPTIONS}
    assert given == {**OPTIONS, **others}


@pytest.mark.parametrize("value", [-1, "last", 1.5])
def test_wrong_count_of_comparisons(value):
    with pytest.raises(ValueError, match="expected 'first' or a count of steps"):
        CompileConfig(verify=value)
