"""A torch whose private names are others: programs run eagerly, say so, and nothing breaks."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import sidefx_train
from sidefx_train.compile import torch_support
from sidefx_train.doctor import doctor
from sidefx_train.errors import GraphBreakError, SideFXWarning
from sidefx_train.torch_compat import early_imports

PACKAGE = Path(__file__).parents[2] / "sidefx_train"

_HIDE = """
import importlib, json, sys, warnings
import torch
from torch import nn

def hide(path):
    module, _, name = path.rpartition(".")
    parts = module.split(".")
    owner = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], start=2):
        owner = getattr(owner, part) if hasattr(owner, part) else importlib.import_module(".".join(parts[:end]))
    if hasattr(owner, name):
        delattr(owner, name)

path, version = sys.argv[1:3]
if version:
    torch.__version__ = torch.torch_version.TorchVersion(version)
"""

_TRAIN = """
def trained(compile):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    losses = []
    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return loss.detach()
    call = compile(step)
    for number in range(4):
        call(torch.full((3, 4), float(number)))
    return losses, call

want, _ = trained(lambda step: step)
if path:
    hide(path)
    try:
        trained(lambda step: step)
    except AttributeError:
        print(json.dumps({"torch_trains": False}))
        sys.exit()
import sidefx_train
with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("always")
    got, call = trained(lambda step: sidefx_train.compile(step, backend="eager"))
found = {"same": got == want, "replays": call.report().replays, }
found["fallbacks"] = sidefx_train.explain(call).to_dict()["fallbacks"]
"""

_USES = """
import copy, pickle
class Model:
    @sidefx_train.compile
    def method(self, x):
        return x + 1

with warnings.catch_warnings(record=True) as more:
    warnings.simplefilter("always")
    found["method"] = Model().method(torch.ones(1)).item()
    net = nn.Linear(2, 1)
    compiled = sidefx_train.compile(net)
    found["module"] = [
        torch.equal(other(torch.ones(1, 2)), net(torch.ones(1, 2)))
        for other in (compiled, copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled)))
    ]
    raised = []
    for options in ({"fullgraph": True}, {"on_failure": "raise"}):
        try:
            sidefx_train.compile(lambda x: x, **options)(torch.ones(1))
        except sidefx_train.errors.GraphBreakError as error:
            raised.append(str(error))
    found["raised"] = raised
    data = [(torch.ones(2, 4), torch.ones(2, 1)) for _ in range(3)]
    result = sidefx_train.fit(nn.Linear(4, 1), data, loss=nn.functional.mse_loss, epochs=1, progress=False)
    found["fit"] = result.report.to_dict()["fallbacks"]

    import lightning as L
    class Lit(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
        def training_step(self, batch, index):
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)
    callback = sidefx_train.SideFXCompile()
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[callback],
                        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    found["lightning"] = callback.report.to_dict()["fallbacks"]
    found["logged"] = sorted(trainer.callback_metrics)
shown += more
"""

_SHOW = """
found["warnings"] = [str(w.message) for w in shown if issubclass(w.category, sidefx_train.errors.SideFXWarning)]
print(json.dumps(found))
"""


def run(hidden: str = "", version: str = "", cache: Path | None = None, uses: str = "") -> dict:
    """Runs a training program after hiding a name of torch, and returns what it found."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(PACKAGE.parent))
    if cache is not None:
        environment["SIDEFX_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-c", _HIDE + _TRAIN + uses + _SHOW, hidden, version]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Exception in thread" not in done.stderr, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def names() -> list[str]:
    """Returns the private names of torch that the compat package uses."""
    found = {}
    for file in sorted((PACKAGE / "torch_compat").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
                found.update({f"{node.module}.{alias.name}": None for alias in node.names})
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch._C."):
                found[".".join(ast.unparse(node).split(".")[:3])] = None
    return list(found)


def test_this_torch_is_supported():
    if torch_support.IMPORT_ERROR is not None:
        raise torch_support.IMPORT_ERROR
    assert torch_support.is_tested() and torch_support.unsupported() is None
    assert torch_support.self_test() is None


def test_a_missing_name_leaves_every_way_of_use_to_eager():
    found = run("torch._C._increment_version", uses=_USES)
    assert found["same"] and found["replays"] == 0
    (record,) = found["fallbacks"]
    assert record["code"] == "SFX401" and record["count"] == 4 and "_increment_version" in record["reason"]
    assert found["method"] == 2.0 and found["module"] == [True] * 3 and found["logged"] == ["loss"]
    assert len(found["raised"]) == 2 and all("_increment_version" in text for text in found["raised"])
    assert [r["code"] for r in found["fit"]] == [r["code"] for r in found["lightning"]] == ["SFX401"]
    assert found["lightning"][0]["count"] == 4
    (warning,) = found["warnings"]
    assert "_increment_version" in warning and torch_support.TESTED[-1] in warning


def test_a_python_whose_bytecode_is_not_known_runs_steps_eagerly(monkeypatch):
    monkeypatch.setattr(torch_support, "PYTHONS", ((3, 8), (3, 9)))
    step = sidefx_train.compile(lambda x: x + 1)
    with pytest.warns(SideFXWarning, match=r"Python 3.1. has another bytecode; supported are 3.8 to 3.9"):
        assert float(step(torch.ones(()))) == 2.0
    (record,) = step.report().fallbacks
    assert record.code == "SFX401", record
    with pytest.raises(GraphBreakError, match="has another bytecode"):
        sidefx_train.compile(lambda x: x + 1, fullgraph=True)(torch.ones(()))
    console = Console(width=160, record=True, file=open(os.devnull, "w"))
    assert not doctor(console) and "has another bytecode" in console.export_text()


def test_a_free_threaded_python_of_the_newest_release_runs_steps_eagerly(monkeypatch):
    monkeypatch.setattr(torch_support, "sys", SimpleNamespace(version_info=(3, 14, 2)))
    assert torch_support.reads_bytecode()
    monkeypatch.setattr(torch_support, "_is_free_threaded", lambda: True)
    assert "Python 3.14 without a global lock has another bytecode" in torch_support.unsupported()


def test_an_import_that_fails_raises_in_the_caller(capfd):
    with pytest.raises(ModuleNotFoundError, match="torch.no_such_module"):
        early_imports._load_submodule("torch.no_such_module")
    assert not capfd.readouterr().err


def test_a_torch_that_is_not_known_is_tested_once(tmp_path):
    for _ in range(2):
        found = run(version="2.99.0", cache=tmp_path)
        assert found["same"] and found["replays"] == 4 and not found["warnings"], found
        records = [file for file in (tmp_path / "sidefx").rglob("*.sfx") if b"2.99.0" in file.read_bytes()]
    assert len(records) == 1


def test_a_failed_self_test_leaves_steps_to_eager(tmp_path):
    hidden = "torch._C._ForceDispatchKeyGuard"
    found = run(hidden, "2.99.0", tmp_path)
    assert found["same"] and found["replays"] == 0
    (warning,) = found["warnings"]
    assert "self-test" in warning and hidden.rpartition(".")[2] in warning, warning


@pytest.mark.slow
@pytest.mark.parametrize("hidden", names())
def test_no_missing_name_breaks_a_program(hidden, tmp_path):
    if hidden == "torch._C.DispatchKey":
        pytest.skip("torch aborts: its own modules are imported halfway then, and leave half of their kernels")
    found = run(hidden, "2.99.0", tmp_path)
    if not found.get("torch_trains", True):
        pytest.skip("torch itself does not train without it")
    assert found["same"]


def test_a_difference_fails_the_self_test(monkeypatch):
    def differs(compiled: bool) -> dict:
        return {"result 0": [1.0] if compiled else [2.0]}

    monkeypatch.setattr(torch_support, "_trained", differs)
    assert "another result 0 than eager" in (torch_support.self_test() or "")
