"""Texts made of values that exist only after the step, given to code of C that looks into them."""

from __future__ import annotations

import io
import string
import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning


class Message(str):
    """As logging libraries have them: a text with more to it."""

    __slots__ = ("record",)


def of_a_subclass(x, file, kept):
    message = Message(f"{x.sum().item():.2f}")
    message.record = {"level": 1}
    file.write(message)
    kept.append((str(message), message.record))


def within_a_list(x, file, kept):
    kept.append(str([f"{x.sum().item():.2f}"]))
    file.write(repr({"a": f"{x.sum().item():.1f}"}))


def by_a_template(x, file, kept):
    kept.append(string.Template("$a and $b").substitute(a=f"{x.sum().item():.1f}", b=2))
    file.write("{a[0]!r:>12}".format(a=[f"{x.sum().item():.1f}"]))


def joined(x, file, kept):
    kept.append(bytes(f"{x.sum().item():.1f}", "ascii"))
    file.write("".join([f"{x.sum().item():.1f}", "a"]).center(20))


@pytest.mark.parametrize("write", [of_a_subclass, within_a_list, by_a_template, joined], ids=lambda fn: fn.__name__)
def test_no_stand_in_is_shown(write):
    def history(compiles):
        file, kept = io.StringIO(), []

        def step(x):
            write(x, file, kept)
            return x * 2

        run = sidefx_train.compile(step, backend="eager") if compiles else step
        for number in range(3):
            run(torch.ones(2) * number)
        return file.getvalue(), kept, [type(each) for each in kept]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert history(True) == history(False)
