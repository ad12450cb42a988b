"""Checks every graph that a test builds after every pass, and what a test leaves of torch's state."""

import gc
import logging
import os
import sys
import warnings

import pytest

os.environ.setdefault("SIDEFX_CHECK_GRAPHS", "1")


def pytest_collection_finish():
    """Keeps the modules of the tests out of later garbage collections, which took a third of the time of a run, and
    pytest from listening to torch's traces, whose records contain stacks: a twentieth of it."""
    logging.getLogger("torch.__trace").propagate = True  # pytest listens to those that do not propagate
    gc.collect()
    gc.freeze()


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
