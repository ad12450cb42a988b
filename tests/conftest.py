"""Checks the graphs that some tests build after every pass, and what a test leaves of torch's state."""

import gc
import logging
import os
import sys
import warnings
import zlib
from itertools import combinations, groupby

import pytest

CHECK_GRAPHS = os.environ.get("SIDEFX_CHECK_GRAPHS")
"""Whether the graphs of all tests are checked, or of none; by default those of every third test, chosen by name,
and of the random programs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow what a test's marks ``covering`` or ``every`` leave out, before slow tests are deselected."""
    for _, group in groupby(items, key=lambda item: getattr(item, "function", item)):
        cases = [case for case in group if case.get_closest_marker("slow") is None]
        for name, left_out in (("covering", _beyond_covering), ("every", _beyond_every)):
            mark = cases[0].get_closest_marker(name) if cases else None
            for case in left_out(cases, *mark.args) if mark is not None else ():
                case.add_marker(pytest.mark.slow)


def _beyond_covering(cases, size):
    """Returns the cases without which every combination of the values of ``size`` parameters still occurs."""
    values = {case: sorted((name, id(value)) for name, value in case.callspec.params.items()) for case in cases}
    combined = {case: set(combinations(values[case], size)) for case in cases}
    missing = set().union(*combined.values())
    while missing:
        best = max(combined, key=lambda case: len(combined[case] & missing))  # the first of equals
        missing -= combined.pop(best)
    return list(combined)


def _beyond_every(cases, step):
    return [case for i, case in enumerate(cases) if i % step]


def pytest_collection_finish():
    """Keeps the modules of the tests out of later garbage collections, which took a third of the time of a run, and
    pytest from listening to torch's traces, whose records contain stacks: a twentieth of it. Collections after each few
    hundred objects took a tenth: only ``make slow`` and ``make fuzz`` have Python's own schedule."""
    logging.getLogger("torch.__trace").propagate = True  # pytest listens to those that do not propagate
    gc.collect()
    gc.freeze()
    if CHECK_GRAPHS is None:
        gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True)
def graphs_are_checked(request):
    """A check takes about a seventh of the time of a capture."""
    name = request.node.nodeid
    chosen = name.startswith(("tests/regression/", "tests/fuzz/")) or zlib.crc32(name.encode()) % 3 == 0
    os.environ["SIDEFX_CHECK_GRAPHS"] = CHECK_GRAPHS or str(int(chosen))


@pytest.fixture(autouse=True)
def frames_are_evaluated_by_cpython(request):
    """Takes torch._dynamo's hook away that a test has left behind: with it, a caller keeps the arguments of a call."""
    yield
    if "torch._C._dynamo" in sys.modules:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

        if get_eval_frame_callback() is not None:
            set_eval_frame(None)
            warnings.warn(f"{request.node.nodeid} leaves a hook for the evaluation of frames", stacklevel=1)


@pytest.fixture(autouse=True)
def autocast_regions_are_left(request):
    """Leaves the autocast regions that a test has left open: in one, torch keeps the casts of weights over steps."""
    yield
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    if depth:
        move = torch.autocast_decrement_nesting if depth > 0 else torch.autocast_increment_nesting
        for _ in range(abs(depth)):
            move()
        torch.clear_autocast_cache()
        warnings.warn(f"{request.node.nodeid} leaves autocast {depth} regions deep", stacklevel=1)
