"""The cache on disk: valid and ignored entries, and reuse by a later process."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import sidefx_train
from sidefx_train import disk_cache
from sidefx_train import torch_compat as compat
from sidefx_train.__main__ import main
from sidefx_train.errors import SideFXWarning
from tests.support.disk_cache import new_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    with compat.inductor_options({"cpp_cache_precompile_headers": False}):
        yield sidefx_train.cache_dir()


def record(folder: Path) -> Path:
    assert disk_cache.store("graph", "k", {"a": [1, 2.5, "x", None]}, "a label")
    return folder / "graphs" / "k.sfx"


@pytest.mark.parametrize(
    "edited", ["__init__.py", "compile/graph/view_chains.py", "compile/native/lstm_kernel.py", "torch_compat/new.py"]
)
def test_the_key_of_a_graph_covers_every_source_file(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "sidefx_train"
    shutil.copytree(disk_cache.PACKAGE_DIR, copy, ignore=shutil.ignore_patterns("__pycache__"))
    plain = disk_cache.package_hash()
    monkeypatch.setattr(disk_cache, "PACKAGE_DIR", str(copy))
    disk_cache.package_hash.cache_clear()
    assert disk_cache.package_hash() == plain, "the same files elsewhere"
    (copy / edited).open("a").write("# an edit\n")
    disk_cache.package_hash.cache_clear()
    assert disk_cache.package_hash() != plain, edited
    disk_cache.package_hash.cache_clear()


def test_what_was_stored_is_loaded(folder: Path) -> None:
    record(folder)
    assert disk_cache.load("graph", "k") == {"a": [1, 2.5, "x", None]}
    assert disk_cache.load("graph", "other") is None


def test_the_folder_is_where_the_environment_says(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder == tmp_path / "sidefx"
    monkeypatch.delenv("SIDEFX_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(disk_cache, "_inductors", disk_cache._chosen_for_inductor())  # its value at import
    assert sidefx_train.cache_dir() == tmp_path / "other" / "sidefx"
    assert disk_cache.machine_dir() != sidefx_train.cache_dir()


def test_what_belongs_to_the_machine_outlives_a_run_of_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "built.so"
    built.write_bytes(b"code")
    monkeypatch.delenv("SIDEFX_CACHE_DIR", raising=False)
    monkeypatch.setattr(disk_cache.tempfile, "gettempdir", lambda: str(tmp_path / "machine"))
    disk_cache._folder.cache_clear()
    try:
        for run in ("first", "second"):
            monkeypatch.setattr(disk_cache, "_inductors", str(tmp_path / run))
            if run == "first":
                name = disk_cache.add_library(built, machine=True)
                assert name is not None and disk_cache.store("native", "k", {"library": name}, "a module", machine=True)
            assert disk_cache.load("native", "k", machine=True) == {"library": name}
            assert disk_cache.load("native", "k") is None, "it is not the run's"
            assert disk_cache.library(name, machine=True) is not None and disk_cache.library(name) is None
        assert [entry.kind for entry in disk_cache.entries() if entry.label == "a module"] == ["native"]
        disk_cache.clear()
        assert disk_cache.load("native", "k", machine=True) is None
    finally:
        disk_cache._folder.cache_clear()


@pytest.mark.parametrize("damage", ["shorter", "flipped", "not ours", "empty", "other key", "writable"])
def test_a_damaged_or_foreign_record_is_ignored_with_a_warning(folder: Path, damage: str) -> None:
    path, key = record(folder), "k"
    content = path.read_bytes()
    if damage == "shorter":
        path.write_bytes(content[:-3])
    elif damage == "flipped":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif damage == "not ours":
        path.write_bytes(b"\x80\x04pickled\nsomething\nelse")
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other key":
        key = "k2"
        path.rename(path.with_name("k2.sfx"))
    else:
        path.chmod(0o666)
    with pytest.warns(SideFXWarning, match="is ignored"):
        assert disk_cache.load("graph", key) is None


def test_a_library_is_loaded_only_if_its_bytes_are_the_ones_that_were_built(folder: Path, tmp_path: Path) -> None:
    built = tmp_path / "built.so"
    built.write_bytes(b"code")
    name = disk_cache.add_library(built)
    assert name is not None and disk_cache.library(name) == disk_cache.library_path(name)
    disk_cache.library_path(name).write_bytes(b"other code")
    with pytest.warns(SideFXWarning, match="have changed"):
        assert disk_cache.library(name) is None
    assert disk_cache.add_library(built) == name  # an invalid file is built again
    assert disk_cache.library(name) is not None


def test_what_was_used_longest_ago_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, key in enumerate(("old", "used", "new")):
        assert disk_cache.store("graph", key, os.urandom(200_000).hex())
        when = time.time() - 1000 + index
        os.utime(folder / "graphs" / f"{key}.sfx", (when, when))
    disk_cache.load("graph", "old")  # now the most recently used
    monkeypatch.setenv("SIDEFX_CACHE_MB", "0.5")
    assert disk_cache.shrink() > 0
    assert {path.stem for path in (folder / "graphs").iterdir()} == {"old", "new"}


def test_sizes_are_looked_up_again_after_a_part_of_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup at each record would take longer than a graph where there are thousands."""
    monkeypatch.setenv("SIDEFX_CACHE_MB", "1")
    lookups = []
    entries = disk_cache.entries
    monkeypatch.setattr(disk_cache, "entries", lambda: lookups.append(1) or entries())
    for index in range(200):  # 20 kB each, incompressible: four times the limit
        disk_cache.store("graph", str(index), os.urandom(10_000).hex())
        assert sum(entry.size for entry in entries()) <= 1 << 20
    assert 100 <= len(lookups) < 200
    assert len(list((folder / "graphs").iterdir())) > 30  # and no more is removed than necessary
    lookups.clear()
    monkeypatch.setenv("SIDEFX_CACHE_MB", "2048")
    for index in range(200):
        disk_cache.store("graph", f"other {index}", index)
    assert len(lookups) <= 1


def test_a_library_stays_until_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDEFX_CACHE_MB", "0")
    built = folder.parent / "built.so"
    built.write_bytes(os.urandom(1000))
    name = disk_cache.add_library(built)
    assert name is not None and disk_cache.store("native", "key", {"library": name})
    assert disk_cache.load("native", "key") is None and disk_cache.library(name) is not None


def test_a_library_that_another_process_removed_is_no_error(folder: Path) -> None:
    assert disk_cache.load_module("gone", folder / "libraries" / "gone.so") is None
    damaged = folder / "damaged.so"
    damaged.write_bytes(b"no library")
    with pytest.raises(ImportError):
        disk_cache.load_module("damaged", damaged)


def test_a_limit_that_is_no_number_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDEFX_CACHE_MB", "much")
    with pytest.warns(SideFXWarning, match="SIDEFX_CACHE_MB='much'"):
        assert disk_cache.limit_bytes() == 2048 << 20


def test_the_command_lists_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(folder)
    assert main(["cache", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "graph" in shown and "a label" in shown and "1 entries" in shown
    assert main(["cache", "--clear"]) == 0
    assert "freed" in capsys.readouterr().out
    assert disk_cache.entries() == [] and disk_cache.load("graph", "k") is None


def trained(factor: float = 1.0, convolution: bool = False) -> tuple[list[float], list[str]]:
    """Returns the losses of a captured step and the notes of its capture."""
    torch.manual_seed(0)
    first: list[nn.Module] = [nn.Linear(8, 16)]
    if convolution:
        first = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Flatten()]
    model = nn.Sequential(*first, nn.ReLU(), nn.Linear(16, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))

    def step() -> torch.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x) * factor, y)
        loss.backward()
        opt.step()
        return loss.detach()

    compiled = sidefx_train.compile(step)
    losses = [float(compiled()) for _ in range(4)]
    return losses, compiled.report().captures[0].notes


FOUND = "compiled graph from the cache"


@pytest.mark.parametrize("convolution", [False, True])
def test_an_equal_graph_is_taken_from_the_cache_and_gives_equal_numbers(folder: Path, convolution: bool) -> None:
    first, notes = trained(convolution=convolution)
    assert FOUND not in notes
    second, notes = trained(convolution=convolution)
    assert FOUND in notes
    assert first == second


def recurrent(both: bool) -> list[str]:
    """Trains a recurrent network, compares with eager, and returns the notes."""

    def trained(compiles: bool) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = nn.LSTM(4, 6, num_layers=1 + both, bidirectional=both, batch_first=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            out, (h, _) = model(x)
            loss = out.square().mean() + h.sum()
            loss.backward()
            opt.step()
            return loss.detach()

        run = sidefx_train.compile(step) if compiles else step
        return [float(run(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(i)))) for i in range(4)], run

    found, run = trained(True)
    assert found == pytest.approx(trained(False)[0], rel=1e-4)
    return list(run.report().captures[0].notes)


@pytest.mark.slow
@pytest.mark.skipif(not compat.calls_dispatcher(), reason="this torch's Inductor calls no operators of ours from C++")
def test_graphs_with_recurrent_layers_are_kept(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their operators are written in Python; a graph's C++ calls them through torch's dispatcher."""
    new_cache(tmp_path, monkeypatch)
    script = (
        "from tests.unit.test_disk_cache import recurrent; print(recurrent(both=False)); print(recurrent(both=True))"
    )
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    for first, second in zip(*said, strict=True):
        assert FOUND not in first and "wrapper failed" not in first
        assert FOUND in second


def test_a_changed_number_in_the_source_misses(folder: Path) -> None:
    trained()
    changed, notes = trained(factor=2.0)
    assert FOUND not in notes
    assert changed != trained()[0]


class Pass(CustomGraphPass):
    """A pass that changes nothing."""

    def __init__(self, identity: str | None) -> None:
        self.identity = identity

    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> str | None:
        return self.identity


def test_passes_of_the_users_own_belong_to_the_key(folder: Path) -> None:
    trained()
    for identity, found in (("one", False), ("one", True), ("two", False), (None, False), (None, False)):
        with compat.inductor_options({"post_grad_custom_post_pass": Pass(identity)}):
            assert (FOUND in trained()[1]) is found, identity
    assert FOUND in trained()[1]


def test_a_graph_that_takes_a_python_number_is_called_with_it(folder: Path) -> None:
    outcomes = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # counts its batches in an integer tensor
        counts = {"calls": 0}

        def step(x: torch.Tensor) -> torch.Tensor:
            counts["calls"] += 1
            return (model(x) * counts["calls"]).sum().detach()

        compiled = sidefx_train.compile(step)
        values = [float(compiled(torch.ones(3, 4) * i)) for i in range(4)]
        outcomes.append((values, int(model[1].num_batches_tracked)))
        found = FOUND in compiled.report().captures[0].notes
        assert compiled.report().fallback_count == 0
    assert found and outcomes[0] == outcomes[1]
    assert outcomes[0][1] == 4


@pytest.mark.parametrize("what", ["graphs", "libraries"])
def test_damaged_files_are_made_again(folder: Path, what: str) -> None:
    first, _ = trained()
    for path in (folder / what).iterdir():
        content = path.read_bytes()
        path.unlink()  # this process has loaded the first
        path.write_bytes(content[:-5] + b"wrong")
    with pytest.warns(SideFXWarning, match="is ignored"):
        second, notes = trained()
    assert FOUND not in notes
    assert first == second
    with warnings.catch_warnings():
        warnings.simplefilter("error", SideFXWarning)
        third, notes = trained()
    assert FOUND in notes and third == first


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from tests.unit.test_disk_cache import trained
losses, notes = trained()
print("losses", losses)
print("found", {found!r} in notes)
print("lowered", any(f"torch._inductor.{{name}}" in sys.modules for name in ("compile_fx", "lowering")))
"""


@pytest.mark.parametrize(
    "chosen",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["a folder that was chosen", "the default folder"],
)
def test_a_second_process_neither_functionalizes_nor_lowers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    """Regression: the default folder was never reused, because Inductor sets its own when it is imported."""
    new_cache(tmp_path if chosen else tmp_path / f"sidefx_train_{os.getuid()}", monkeypatch)
    if not chosen:
        monkeypatch.delenv("SIDEFX_CACHE_DIR")
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
    root = str(Path(__file__).parents[2])
    program = PROGRAM.format(tests=root, found=FOUND)
    seen = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=300)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if re.match("losses|found|lowered", line)]
        seen.append(dict(line.split(" ", 1) for line in lines))
    assert seen[0]["found"] == "False" and seen[1]["found"] == "True"
    assert seen[0]["losses"] == seen[1]["losses"]
    assert seen[0]["lowered"] == "True" and seen[1]["lowered"] == "False"


BESIDE = """
import os, torch, sidefx_train
step = sidefx_train.compile(lambda x: x * 2 + 1, warmup="background")
for i in range(4):
    step(torch.full((2,), float(i)))
    assert step.wait(timeout=120)
report = step.report()
assert not report.breaks, str(report)
assert report.replays == 2, str(report)
assert (os.environ["TMPDIR"] in str(sidefx_train.cache_dir())) and "inductor" not in str(sidefx_train.cache_dir())
"""


def test_a_worker_leaves_its_graph_in_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the worker wrote to Inductor's folder, which the waiting process did not read."""
    new_cache(tmp_path / f"sidefx_train_{os.getuid()}", monkeypatch)
    monkeypatch.delenv("SIDEFX_CACHE_DIR")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_worker_builds_again_what_lost_its_library(folder: Path) -> None:
    """Regression: the worker took the graph as cached, the waiting process found no library, and stayed eager."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 3 + 1).sin()

    for expected in (0, 1):  # libraries that exist before, and are removed
        for file in (folder / "libraries").glob("*"):
            if expected:
                file.unlink()
        compiled = sidefx_train.compile(step, warmup="background")
        for i in range(4):
            assert torch.allclose(compiled(torch.full((2,), float(i))), step(torch.full((2,), float(i))))
            assert compiled.wait(timeout=120)
        report = compiled.report()
        assert not report.breaks, str(report)
        assert report.replays == 2, str(report)


def test_graphs_with_functions_of_changing_numbers_are_kept(folder: Path) -> None:
    """Regression: a graph with ``min`` of a changing number, as with Adafactor, was lowered in every process."""
    outcomes = []
    for function in (math.exp, math.exp, math.log1p):
        counts = {"calls": 0.5}

        def step(x: torch.Tensor, function: Any = function, counts: Any = counts) -> torch.Tensor:
            counts["calls"] += 0.1
            return x * min(counts["calls"], 0.75) * function(counts["calls"])

        compiled = sidefx_train.compile(step)
        values = [compiled(torch.ones(3)).tolist() for _ in range(4)]
        counts["calls"] = 0.5
        assert values == [pytest.approx(step(torch.ones(3)).tolist()) for _ in range(4)]
        outcomes.append(FOUND in compiled.report().captures[-1].notes)
    assert outcomes == [False, True, False]
