"""The same seed twice, on one machine: the same bits, whatever the timings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train import fit
from sidefx_train.compile.backend import inductor
from sidefx_train.compile.runtime import background_compile
from tests.lightning.harness import Classifier, data, quiet_trainer
from tests.support.disk_cache import new_cache
from tests.support.parity import photograph, same


class Words(nn.Module):
    """Embeddings, whose gradient is an index-add of rows, dropout and a norm."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(self.table(x).mean(1))


def words():
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 20, (48, 6), generator=generator)
    return x, torch.randint(0, 3, (48,), generator=generator)


def state_of(model):
    return photograph(dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("cold", [False, True], ids=["cached", "cold"])
def test_fit_with_a_seed(tmp_path, monkeypatch, cold):
    """The worker's time and the contents of the cache make no difference; nothing is measured."""
    new_cache(tmp_path / "first", monkeypatch)
    monkeypatch.setattr(inductor, "choose_products", None)
    monkeypatch.setattr(inductor, "choose_layers", None)
    states = []
    for run in range(2):
        if run and cold:
            new_cache(tmp_path / "second", monkeypatch)
        torch.manual_seed(5)
        model = Words()
        torch.manual_seed(run)  # fit's seed takes precedence
        result = fit(model, words(), max_steps=12, seed=3, progress=False)
        assert result.report.replays == result.report.calls == 12, str(result.report)
        states.append(state_of(model))
    same(states[0], states[1], "fit", True)


@pytest.mark.parametrize("asked", ["option", "torch"])
def test_takes_over_at_the_first_call(asked, monkeypatch):
    def never(*given):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(background_compile, "start", never)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    options = {"deterministic": True} if asked == "option" else {}
    call = sidefx_train.compile(step, backend="eager", warmup="background", **options)
    if asked == "torch":
        torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            call(torch.ones(3, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (call.report().calls, call.report().replays) == (3, 3), str(call.report())


def test_lightning_trainer(tmp_path):
    """``Trainer(deterministic=True)``, with the default options of the callback."""
    states = []
    for _ in range(2):
        callback = sidefx_train.SideFXCompile(backend="aot_eager")
        torch.manual_seed(0)
        module = Classifier()
        try:
            quiet_trainer(tmp_path, deterministic=True, callbacks=[callback]).fit(module, data(24))
        finally:
            torch.use_deterministic_algorithms(False)
        assert callback.report.replays == callback.report.calls == 6, str(callback.report)
        states.append(state_of(module))
    same(states[0], states[1], "fit", True)


PROGRAM = """
import sys, time
import torch
sys.path.insert(0, {root!r})
from tests.unit.runtime.test_deterministic import Words, words
from sidefx_train import fit
from sidefx_train.fit import loop
from pathlib import Path
folder, kill = Path(sys.argv[1]), len(sys.argv) > 2
torch.manual_seed(5)
model = Words()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = words()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
if kill:
    saved = loop._Run.save
    def save(self, path, position):
        saved(self, path, position)
        if position.epoch == 2 and path.name == "last.ckpt":
            print("saved", flush=True)
            time.sleep(60)
    loop._Run.save = save
fit(model, loader, epochs=4, optimizer=optimizer, seed=3, progress=False, checkpoint_dir=folder,
    resume=(folder / "last.ckpt").exists())
torch.save(model.state_dict(), folder / "end.pt")
"""


@pytest.mark.slow
def test_resumed_after_it_was_killed(tmp_path):
    root = str(Path(__file__).parents[3])
    program = PROGRAM.format(root=root)
    environment = {**os.environ, "PYTHONPATH": root}

    def run(folder, *more):
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", program, str(folder), *more]
        return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)

    straight = run(tmp_path / "straight")
    assert straight.wait(300) == 0
    killed = run(tmp_path / "killed", "kill")
    assert killed.stdout.readline().strip() == "saved"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    time.sleep(0.1)
    assert not (tmp_path / "killed" / "end.pt").exists()
    assert run(tmp_path / "killed").wait(300) == 0
    want, have = (torch.load(tmp_path / name / "end.pt") for name in ("straight", "killed"))
    same(photograph(want), photograph(have), "weights", True)
