"""The surroundings of a captured fit: copies of the trainer, profilers, threads, options from a command line."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import time
import warnings

import pytest
from lightning import pytorch as pl
from lightning.pytorch.profilers import SimpleProfiler
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.api import compile_step
from sidefx_train.compile.runtime import background_compile
from sidefx_train.errors import BackendError
from tests.lightning.harness import Classifier, data, parity, quiet_trainer

ROWS = 24


class Copies(pl.Callback):
    """Copies the trainer in the middle of a fit."""

    def __init__(self, how):
        self.how = how
        self.copies = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3:
            copied = self.how(trainer)
            loop = copied.fit_loop.epoch_loop.automatic_optimization
            assert loop.run.__func__ is type(loop).run, "a copy has Lightning's own loop"
            assert loop.run.__self__ is loop
            found = [c for c in copied.callbacks if isinstance(c, sidefx_train.SideFXCompile)]
            module.events.append((type(copied).__name__, sum(p.sum().item() for p in copied.model.parameters())))
            module.events.append([c.report.calls for c in found if c.report.calls])

    def __getstate__(self):
        return {}


@pytest.mark.parametrize("how", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_trainer_copied_during_fit(tmp_path, how):
    parity(Classifier, tmp_path, rows=ROWS, epochs=1, callbacks=lambda: [Copies(how)])


class Hooked(pl.Callback):
    def on_after_backward(self, trainer, module):
        pass


class OwnRange(Classifier):
    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("own"):
            return F.cross_entropy(self(batch[0]), batch[1])


def test_profiler_has_the_rows_of_eager(tmp_path):
    rows = []
    for callbacks in ([], [sidefx_train.SideFXCompile(backend="eager", warmup="now", fullgraph=True)]):
        profiler = SimpleProfiler()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = quiet_trainer(tmp_path, profiler=profiler, callbacks=[Hooked(), *callbacks])
            trainer.fit(OwnRange(), data(ROWS))
        rows.append({name: len(times) for name, times in profiler.recorded_durations.items()})
    ours = {name: count for name, count in rows[1].items() if "SideFXCompile" not in name}
    native = {name: count for name, count in rows[0].items() if "SideFXCompile" not in name}
    assert ours == native
    assert native["[Strategy]SingleDeviceStrategy.backward"] == native["own"] == 6


def test_worker_does_not_outlive_the_fit(tmp_path, monkeypatch):
    compile_graphs = background_compile.compile_capture.compile_graphs

    def slow(*given):
        if threading.current_thread().name == "sidefx-warmup":
            time.sleep(1.0)
        return compile_graphs(*given)

    monkeypatch.setattr(background_compile.compile_capture, "compile_graphs", slow)
    sidefx_train.compile.native.native_module(), sidefx_train.compile.native.products_module()
    seen = []

    class Looks(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.extend(thread.name for thread in threading.enumerate())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [sidefx_train.SideFXCompile(backend="eager"), Looks()]
        quiet_trainer(tmp_path, callbacks=callbacks).fit(Classifier(), data(ROWS))
    assert "sidefx-warmup" in seen, seen
    assert "sidefx-warmup" not in [thread.name for thread in threading.enumerate()]


def test_worker_that_fails_warns(tmp_path, monkeypatch):
    def broken(*given):
        raise BackendError("SFX201", "out of luck")

    monkeypatch.setattr(background_compile, "build", broken)
    callback = sidefx_train.SideFXCompile(backend="eager")

    class Waits(pl.Callback):
        def on_train_batch_end(self, *given):
            callback._compiled.wait(60)

    with pytest.warns(sidefx_train.errors.SideFXWarning, match="SFX201.*out of luck"):
        quiet_trainer(tmp_path, callbacks=[callback, Waits()]).fit(Classifier(), data(ROWS))


def test_options_are_those_of_compile():
    """By name and default, so that a command line and a type checker see them."""
    ours = dict(inspect.signature(sidefx_train.SideFXCompile.__init__).parameters)
    theirs = dict(inspect.signature(compile_step).parameters)
    del ours["self"], theirs["fn"]
    assert list(ours) == list(theirs)
    others = {name: p.default for name, p in theirs.items()} | {"warmup": "background"}
    assert {name: p.default for name, p in ours.items()} == others


def test_copied_callback_begins_with_nothing():
    callback = sidefx_train.SideFXCompile(backend="eager", verify=2)
    copied = pickle.loads(pickle.dumps(callback))
    assert copied._options == callback._options and copied.report.calls == 0


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_the_original_has_the_report_of_a_copy_that_trained(tmp_path, how):
    """Libraries copy the callbacks they are given."""
    callback = sidefx_train.SideFXCompile(backend="eager", warmup="now")
    copied = how(callback)
    quiet_trainer(tmp_path, callbacks=[copied], max_epochs=1).fit(Classifier(), data(ROWS))
    report = copied.report
    assert report.replays > 0 and callback.report.to_dict() == report.to_dict(), str(callback.report)
    assert how(callback).report.calls == how(copied).report.calls == 0, "a copy begins with nothing"
    del copied
    gc.collect()
    assert callback.report is report
