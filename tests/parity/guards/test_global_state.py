"""Global state that a step reads: its value is guarded, whoever changes it between two calls."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import os
import socket
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import sidefx_train


@contextlib.contextmanager
def swapped(ask, give, value):
    before = ask()
    give(value)
    try:
        yield
    finally:
        give(before)


deterministic, matmul, cuda = torch.utils.deterministic, torch.backends.mkldnn.matmul, torch.backends.cuda


def filled():
    return deterministic.fill_uninitialized_memory


def precision():
    return matmul.fp32_precision


ARRAY, half, sparse = np.array([1.23456, 2e5]), torch.float16, torch.sparse.check_sparse_tensor_invariants
autocast_dtype = functools.partial(torch.get_autocast_dtype, "cpu")
set_autocast = functools.partial(torch.set_autocast_dtype, "cpu")


def regions_dtype():
    with torch.autocast("cpu"):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


ASKS = {
    "profiler": (torch.autograd._profiler_enabled, torch.autograd.profiler.profile),
    "flash": (cuda.flash_sdp_enabled, lambda: swapped(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False)),
    "attention kernels": (cuda.math_sdp_enabled, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "precision": (precision, lambda: swapped(precision, lambda v: setattr(matmul, "fp32_precision", v), "bf16")),
    "fill": (filled, lambda: swapped(filled, lambda v: setattr(deterministic, "fill_uninitialized_memory", v), False)),
    "warn always": (
        torch.is_warn_always_enabled, lambda: swapped(torch.is_warn_always_enabled, torch.set_warn_always, True)
    ),
    "multithreading": (torch._C._is_multithreading_enabled, lambda: torch.autograd.set_multithreading_enabled(False)),
    "view replay": (torch._C._is_view_replay_enabled, lambda: torch.autograd._force_original_view_tracking(True)),
    "hooks of saved tensors": (
        torch._C._autograd._saved_tensors_hooks_is_enabled,
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("x"),
    ),
    "cudnn": (lambda: torch.backends.cudnn.benchmark, lambda: torch.backends.cudnn.flags(benchmark=True)),
    "errors of numpy": (lambda: np.geterr()["divide"], lambda: np.errstate(divide="ignore")),
    "all errors of numpy": (np.geterr, lambda: np.errstate(over="raise")),
    "buffer of numpy": (np.getbufsize, lambda: swapped(np.getbufsize, np.setbufsize, 1600)),
    "printing of numpy": (lambda: str(ARRAY), lambda: np.printoptions(precision=2)),
    "printing in a list": (lambda: f"{[ARRAY]} {ARRAY!r}", lambda: np.printoptions(precision=2)),
    "printing by %": (lambda: "%s" % (ARRAY,), lambda: np.printoptions(suppress=True, sign="+")),
    "printing of a number": (lambda: repr(np.float64(1.5)), lambda: np.printoptions(legacy="1.25")),
    "printing by a function": (lambda: np.array2string(ARRAY), lambda: np.printoptions(precision=2)),
    "dtype of autocast": (lambda: torch.get_autocast_dtype("cpu"), lambda: swapped(autocast_dtype, set_autocast, half)),
    "dtype of a region": (regions_dtype, lambda: swapped(autocast_dtype, set_autocast, half)),
    "sparse": (lambda: sparse.is_enabled(), lambda: sparse()),
    "the day": (datetime.date.today, contextlib.nullcontext),
    "working directory": (os.getcwd, lambda: contextlib.chdir("/")),
    "absolute path": (lambda: os.path.abspath("x/../y"), lambda: contextlib.chdir("/")),
    "process": (lambda: (os.getpid(), os.getppid(), os.getuid()), contextlib.nullcontext),
    "machine": (lambda: (socket.gethostname(), os.cpu_count()), contextlib.nullcontext),
}  # fmt: skip


@pytest.mark.parametrize("first", ["as it is", "changed"])
@pytest.mark.parametrize("name", ASKS)
def test_a_setting_that_changes_between_calls(name, first):
    ask, change = ASKS[name]

    def step(x):
        return x.sin(), ask()

    captured = sidefx_train.compile(step, backend="eager")
    order = [contextlib.nullcontext, change] * 2
    for state in order if first == "as it is" else order[::-1]:
        with state():
            assert captured(torch.ones(2))[1] == ask()
    report = captured.report()
    assert not report.breaks and len(report.captures) <= 2 and report.replays == 4, report


def test_numpys_printing_changed_in_a_step_is_what_its_prints_show(capsys):
    def step(x):
        print(ARRAY)
        with np.printoptions(precision=2):
            shown = str(ARRAY)
            print([ARRAY], shown)
        print(ARRAY)
        return x.sin(), shown

    expected = step(torch.ones(2))[1], capsys.readouterr().out
    captured = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        for _ in range(3):
            assert (captured(torch.ones(2))[1], capsys.readouterr().out) == expected
    assert captured.report().replays


def test_a_setting_of_autocast_that_the_step_sets_is_set():
    captured = sidefx_train.compile(lambda x: (x.sin(), torch.set_autocast_dtype("cpu", half)), backend="eager")
    before = autocast_dtype()
    try:
        for dtype in (half, torch.bfloat16, half, torch.bfloat16):
            set_autocast(dtype)
            captured(torch.ones(2))
            assert autocast_dtype() is half
    finally:
        set_autocast(before)


def test_a_decision_on_the_profiler():
    def step(x):
        return x.cos() if torch.autograd._profiler_enabled() else x.sin()

    captured, x = sidefx_train.compile(step, backend="eager"), torch.ones(3)
    for profiling in (False, True, False, True):
        with torch.autograd.profiler.profile() if profiling else contextlib.nullcontext():
            torch.testing.assert_close(captured(x), step(x))


def test_clocks_are_read_at_every_call():
    captured = sidefx_train.compile(lambda x: (x.sin(), datetime.datetime.now()), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        times = [captured(torch.ones(2))[1] for _ in range(4)]
    assert times == sorted(set(times))


def test_which_attention_may_be_used_is_guarded():
    q = torch.randn(1, 2, 4, 8)
    captured = sidefx_train.compile(lambda q: scaled_dot_product_attention(q, q, q), backend="eager")
    for kernels in ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kernels):
            assert torch.equal(captured(q), scaled_dot_product_attention(q, q, q))
    assert len(captured.report().captures) == 3


def test_a_setting_inside_the_step_is_restored():
    def inside(x):
        with sdpa_kernel(SDPBackend.MATH):
            return x.sin(), cuda.flash_sdp_enabled()

    def stops(x):
        with sdpa_kernel(SDPBackend.MATH):
            open("/dev/null").close()
            return x.sin(), cuda.flash_sdp_enabled()

    def leaves(x):
        torch.set_warn_always(not torch.is_warn_always_enabled())
        return x.sin(), torch.is_warn_always_enabled()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        for step in (inside, stops, leaves):
            captured = sidefx_train.compile(step, backend="eager")
            for _ in range(3):
                assert captured(torch.ones(2))[1] is step(torch.ones(2))[1] or step is leaves
                assert cuda.flash_sdp_enabled()
    assert not torch.is_warn_always_enabled()


def test_a_capture_leaves_the_switch_of_saved_hooks_alone():
    captured = sidefx_train.compile(lambda x: x.sin(), backend="eager")
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        captured(torch.ones(2))
        with pytest.raises(RuntimeError, match="no hooks here"):
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()


# ---------------------------------------------------------------------- modules that do not exist
def fails(x):
    try:
        import sidefx_missing_one

        return sidefx_missing_one.x
    except ImportError as error:
        return str(error)


def fails_by_function(x):
    try:
        return importlib.import_module("sidefx_missing_one").x
    except ImportError as error:
        return str(error)


def fails_below(x):
    try:
        import json.sidefx_missing_one as found

        return found.x
    except ImportError as error:
        return str(error)


def looks_for(x):
    return importlib.util.find_spec("sidefx_missing_one") is not None


@pytest.mark.parametrize("step", [fails, fails_by_function, fails_below, looks_for])
@pytest.mark.parametrize("how", ["in sys.modules", "as a file"])
def test_a_module_that_appears(step, how, tmp_path, monkeypatch):
    name = "json.sidefx_missing_one" if step is fails_below else "sidefx_missing_one"
    if how == "as a file" and step is fails_below:
        pytest.skip("nothing is written into the standard library")
    monkeypatch.syspath_prepend(str(tmp_path))
    captured = sidefx_train.compile(lambda x: (x.sin(), step(x))[1], backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        try:
            assert captured(torch.ones(2)) == captured(torch.ones(2)) == step(torch.ones(2))
            assert captured.report().replays == 2
            if how == "in sys.modules":
                made = types.ModuleType(name)
                made.x = 5
                made.__spec__ = importlib.machinery.ModuleSpec(name, None)
                sys.modules[name] = made
                if step is fails_below:
                    sys.modules["json"].sidefx_missing_one = made
            else:
                (tmp_path / f"{name}.py").write_text("x = 5\n")
                importlib.invalidate_caches()
            for _ in range(2):
                assert captured(torch.ones(2)) == step(torch.ones(2))
        finally:
            sys.modules.pop(name, None)
            vars(sys.modules["json"]).pop("sidefx_missing_one", None)


def test_a_module_that_fails_runs_at_every_call(tmp_path, monkeypatch):
    (tmp_path / "sidefx_failing.py").write_text("import sys\nsys.sidefx_tries.append(1)\nimport sidefx_missing_one\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "sidefx_tries", [], raising=False)

    def step(x):
        try:
            import sidefx_failing  # noqa: F401
        except ImportError as error:
            return x.sin(), str(error)

    captured = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        captured(torch.ones(2))
        before = len(sys.sidefx_tries)
        captured(torch.ones(2))
        assert len(sys.sidefx_tries) == before + 1


@pytest.mark.parametrize("by", ["statement", "function"])
def test_a_module_that_makes_tensors_is_imported_in_the_real_world(by, tmp_path, monkeypatch):
    name = f"sidefx_of_tensors_{by}"
    (tmp_path / f"{name}.py").write_text("import torch\nT = torch.ones(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def by_function(x):
        return x + importlib.import_module(name).T

    def by_statement(x):
        import sidefx_of_tensors_statement

        return x + sidefx_of_tensors_statement.T

    captured = sidefx_train.compile(by_function if by == "function" else by_statement, backend="eager", fullgraph=True)
    try:
        for i in range(3):
            torch.testing.assert_close(captured(torch.full((3,), float(i))), torch.full((3,), 1.0 + i))
        assert type(sys.modules[name].T) is torch.Tensor
    finally:
        sys.modules.pop(name, None)


def test_autocast_regions_that_lowering_leaves_open_are_left(monkeypatch):
    """In an open region, torch would keep the casts of weights over eager steps."""
    from sidefx_train.compile.backend import compile_graph

    before = compile_graph.build_functional

    def leaves_one_open(*args):
        torch.autocast_increment_nesting()
        return before(*args)

    monkeypatch.setattr(compile_graph, "build_functional", leaves_one_open)
    sidefx_train.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0
