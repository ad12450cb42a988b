"""Questions about files (``os.path.exists``, ``Path.is_file``): the prologue of the step asks them at every call.

A decision on the answer is guarded like one on a random number. What the step does to a file runs natively, in front of
the part that asks, and so does what may do something to one when it is freed, such as an open file.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.shadows.finalizers import may_have_freed_files
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.draws.draw import FILE_TESTS, PATH_TESTS
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_PATHS = (pathlib.PosixPath, pathlib.WindowsPath)


def _ask(function: Callable[[str], Any], world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs or may_have_freed_files(world.heap):
        return ABSENT
    text = world.interp.call(os.fspath, args, {}) if type(args[0]) in _PATHS else args[0]
    return world.random_draws.ask(function, (text,)) if type(text) is str else ABSENT


for _function in FILE_TESTS:
    registry.intercept(_function)(functools.partial(_ask, _function))

for _method, _of_text in PATH_TESTS.items():
    registry.intercept(_method)(functools.partial(_ask, _of_text))
