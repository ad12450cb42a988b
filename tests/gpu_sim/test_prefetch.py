"""Batches that are copied to the device while a step runs there, on a simulated device only.

Its copies happen as late as they may, and every access to memory that is in no order with an earlier one raises.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lightning import pytorch as pl
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import sidefx_train
from sidefx_train.compile.gpu import prefetch
from sidefx_train.compile.gpu.prefetch import Prefetcher
from sidefx_train.compile.gpu.replaying import recording_on_host
from sidefx_train.compile.gpu.section import Section
from sidefx_train.compile.gpu.simulation.recorder import HostRecorder
from sidefx_train.compile.gpu.simulation.streams import HostCopyStream, HostEvent, MissingWait
from sidefx_train.compile.gpu.static_replay import StaticReplay
from sidefx_train.fit import loop
from sidefx_train.report import CudaGraphRecord, PrefetchRecord
from tests.gpu.training import BATCHES, Training

STEPS = BATCHES[:10]


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def device(request):
    made = HostRecorder(pinned=request.param)
    with recording_on_host(made):
        yield made


pinned = pytest.mark.parametrize("device", [True], indirect=True, ids=["pinned"])


def copies(batches: Any) -> list[Any]:
    return [tuple(t.clone() for t in batch) for batch in batches]


def train(batches: Any, ahead: bool, between: Any = lambda training, index, batch: batch) -> tuple[Any, list[Any]]:
    """Trains; ``between(training, index, batch)`` gets each batch after it was prefetched, and returns the next one.

    Raises:
        AssertionError: a step ran eagerly: an error of the recorder's leads to that.
    """
    training, losses, batches = Training(True), [], copies(batches)
    batch = batches[0]
    for index in range(len(batches)):
        losses.append(training.step(*batch))
        if index + 1 < len(batches):
            if ahead:
                training.step.prefetch(*batches[index + 1])
            batch = between(training, index + 1, batches[index + 1])
    for fallback in training.step.report().fallbacks:
        raise AssertionError(fallback.reason)
    return training, [*losses, *training.values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def compare(batches: Any = STEPS, between: Any = lambda training, index, batch: batch) -> PrefetchRecord:
    """Compares training with and without prefetches, bit by bit; returns the counts."""
    training, found = train(batches, True, between)
    _, expected = train(batches, False, between)
    same(found, expected)
    return training.step.report().prefetches


def test_ten_steps_are_equal_with_and_without(device):
    record = compare()
    # The first step captures, the second records: from the third on there is a recording to prefetch for.
    assert (record.prefetched, record.used, record.dropped) == (8, 8, {}), record


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
@pytest.mark.parametrize("wait", ["filled", "consumed"])
def test_a_missing_wait_is_seen(device, monkeypatch, wait):
    """The recorder complains where the machinery forgets one of its two waits."""
    if wait == "filled":
        monkeypatch.setattr(HostRecorder, "read_after", lambda self, event, memory: None)
    else:
        monkeypatch.setattr(HostCopyStream, "wait", lambda self, event: None)
    with pytest.raises(AssertionError, match="has not been filled yet" if wait == "filled" else "is still read"):
        train(STEPS, True)


def test_an_event_that_is_recorded_too_early_is_seen(device, monkeypatch):
    """Staging that counts as consumed before it was read is overwritten while it is read."""
    early = []

    def record_event(self):
        early.append(self.order.event(0))
        return early[0]

    monkeypatch.setattr(HostRecorder, "record_event", record_event)
    with pytest.raises(MissingWait, match="still read"):
        train(STEPS, True)


def test_copies_without_order_give_wrong_numbers(device, monkeypatch):
    """Without its checks the simulation reads what was not copied yet: the numbers prove that copies are late."""
    monkeypatch.setattr(HostRecorder, "read_after", lambda self, event, memory: None)
    monkeypatch.setattr(type(device.order), "touches", lambda self, stream, address, writes: None)
    _, found = train(STEPS, True)
    assert found[2].isnan()


def test_a_batch_that_changes_after_the_prefetch_is_copied_again(device):
    def between(training: Training, index: int, batch: Any) -> Any:
        if index == 5:
            batch[0].mul_(2)
        if index == 6:
            batch[1].copy_(batch[1].flip(0))
        if index == 7:
            batch[0].data = batch[0] * 3
        return batch

    record = compare(between=between)
    assert (record.prefetched, record.used, record.dropped) == (8, 5, {prefetch.CHANGED: 3}), record


def test_another_batch_is_copied_by_its_step(device):
    others = copies(BATCHES[10:])

    def between(training: Training, index: int, batch: Any) -> Any:
        if index == 4:
            return others[0]
        return (batch[0], others[1][1]) if index == 6 else batch

    record = compare(between=between)
    dropped = {prefetch.ANOTHER: 1, prefetch.REPLACED: 1}
    assert (record.prefetched, record.used, record.dropped) == (8, 6, dropped), record


@pytest.mark.parametrize("waits", [frozenset(), frozenset({1})], ids=["none", "second"])
def test_the_host_waits_for_a_copy_where_the_program_does(device, monkeypatch, waits):
    """``x.to("cuda")`` lets the program change ``x``: a copy must have read the program's memory by then."""
    waited = []
    monkeypatch.setattr(HostEvent, "synchronize", lambda self: waited.append(self))
    section = Section(("a0", "a1"), ("input", "input"), (0,), False, waits)
    record = PrefetchRecord()
    replay = StaticReplay(lambda args: [args[0] - args[1]], section, device, 8, 2**30, CudaGraphRecord())
    replay.prefetcher = Prefetcher(device, record)
    for index, given in enumerate([(), (), (0, 1), (0,), (1,)]):
        x, y = torch.randn(2, 4)
        replay.prefetcher.prefetch([(x, y)[i] for i in given])
        waited.clear()
        (result,) = replay([x, y])
        assert torch.equal(result, x - y)
        assert len(waited) == (device.pinned and bool(waits & set(given))), index
    assert record == PrefetchRecord(prefetched=3, used=3)


def test_shapes_that_alternate(device):
    """Two recordings take from the same prefetcher; a shape without a recording runs plainly."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)

    def step(x: Any) -> Any:
        return net(x).square().mean()

    compiled = sidefx_train.compile(step, backend="aot_eager", dynamic=True)
    sizes = [4, 4, 5, 5, 4, 5, 4, 5, 6, 4]
    batches = [torch.randn(rows, 3) for rows in sizes]
    with torch.no_grad():
        for x, following in zip(batches, [*batches[1:], None], strict=True):
            torch.testing.assert_close(compiled(x), step(x))
            if following is not None:
                compiled.prefetch(following)
    report = compiled.report()
    assert sum(capture.cuda_graph.recordings for capture in report.captures) == 2, report
    record = report.prefetches
    assert record.prefetched == 8 and record.dropped == {prefetch.NOT_REPLAYED: 2} and record.used == 6, record
    assert "batches prefetched to the device" in str(report) and prefetch.NOT_REPLAYED[:20] in str(report)


def test_entries_that_alternate(device):
    """Micro-steps with and without an update are two captures, and both take what was prefetched."""
    found = []
    for ahead in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Any, y: Any, update: bool, net=net, optimizer=optimizer) -> Any:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        compiled = sidefx_train.compile(step, backend="aot_eager", keep_slower=True)
        batches, losses = copies(BATCHES), []
        for index, batch in enumerate(batches):
            losses.append(compiled(*batch, index % 2 == 1))
            if ahead and index + 1 < len(batches):
                compiled.prefetch(*batches[index + 1], index % 2 == 0)
        found.append([*losses, *(p.detach().clone() for p in net.parameters())])
        if ahead:
            record, captures = compiled.report().prefetches, compiled.report().captures
    same(*found)
    assert sum(capture.cuda_graph.recordings > 0 for capture in captures) == 2, captures
    assert record.used >= 6, record


def test_a_step_that_raises_leaves_the_batch_for_the_next_call(device):
    training, _ = train(STEPS[:4], True)
    batch = copies(STEPS[4:5])[0]
    assert training.step.prefetch(*batch)
    with pytest.raises(TypeError):
        training.step(*batch, 1)
    training.step(*batch)
    assert training.step.report().prefetches.dropped == {}
    assert training.step.prefetch(*copies(STEPS[5:6])[0]) and training.step.prefetch(*batch)
    assert training.step.report().prefetches.dropped == {prefetch.SUPERSEDED: 1}
    training.step(*batch)
    with pytest.raises(IndexError):  # a class that does not exist
        bad = (batch[0], batch[1] + 7)
        training.step.prefetch(*bad)
        training.step(*bad)
    training.step(*batch)


def test_what_cannot_be_prefetched_is_not(device):
    record = PrefetchRecord()
    prefetcher = Prefetcher(device, record)
    with torch.inference_mode():
        inference = torch.ones(3)
    for tensor in [
        inference,
        torch.ones(3, requires_grad=True),
        torch.ones(1).expand(3),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3).to_sparse(),
        nn.Parameter(torch.ones(3)),
        torch.empty(0),
    ]:
        assert not prefetcher.prefetch([tensor])
    device.least_prefetched = 64
    assert not prefetcher.prefetch([torch.ones(15)]) and prefetcher.prefetch([torch.ones(16)])
    assert record == PrefetchRecord(prefetched=1)


def test_memory_that_runs_out_ends_prefetching(device, monkeypatch):
    def fails(self, to, source):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(HostCopyStream, "copy", fails)
    training, found = train(STEPS, True)
    monkeypatch.undo()
    same(found, train(STEPS, False)[1])
    record = training.step.report().prefetches
    assert record == PrefetchRecord(refused="OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    assert "no more: OutOfMemoryError" in str(training.step.report())


def test_layouts_beyond_the_limit_are_forgotten(device):
    prefetcher, record = Prefetcher(device, PrefetchRecord(), limit=2), []
    for rows in (1, 2, 3, 1, 2):
        x = torch.randn(rows)
        prefetcher.prefetch([x])
        with prefetcher.staged([x]) as (staged,):
            record.append(torch.equal(device.copy_staged(torch.empty(rows), staged), x))
    assert all(record) and len(prefetcher._stagings) == 2


def test_everything_is_freed_with_the_step(device):
    training, _ = train(STEPS[:4], True)
    batch = copies(STEPS[4:5])[0]
    assert training.step.prefetch(*batch)
    kept = [weakref.ref(batch[0]), weakref.ref(training.step._batches._prefetcher)]
    net = weakref.ref(training.net)
    del batch, training
    gc.collect()
    assert [each() for each in [*kept, net]] == [None, None, None]


def test_on_the_cpu_nothing_happens(monkeypatch):
    training = Training(True)
    for batch in STEPS[:3]:
        training.step(*batch)
        assert not training.step.prefetch(*batch)
    monkeypatch.setattr(Prefetcher, "__init__", lambda self, *args: pytest.fail("nothing to prefetch for"))
    assert not training.step.prefetch(*STEPS[3])
    assert training.step.report().prefetches == PrefetchRecord()
    assert "prefetched" not in str(training.step.report())


# ---------------------------------------------------------------------- loops


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def by_operators(monkeypatch):
    """Steps of ``fit`` run operator by operator: the recorder sees no kernels."""
    compiled = loop.compile_step
    options = {"backend": "aot_eager", "warmup": "now", "keep_slower": True}
    monkeypatch.setattr(loop, "compile_step", lambda step, **given: compiled(step, **{**given, **options}))


def fitted(batches: Any, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    net = model()
    result = sidefx_train.fit(net, DataLoader(batches, batch_size=None), accelerator="cpu", progress=False, **options)
    return result, [p.detach().clone() for p in net.parameters()]


@pinned
@pytest.mark.parametrize("options", [{"max_steps": 5}, {"max_steps": 14}], ids=["part", "more"])
def test_fit_prefetches_all_batches_but_the_first(device, by_operators, monkeypatch, options):
    result, found = fitted(BATCHES, **options)
    record, steps = result.report.prefetches, len(result.history)
    epochs = -(-steps // len(BATCHES))
    assert (record.prefetched, record.used, record.dropped) == (steps - epochs, steps - epochs, {}), record
    assert result.report.captures[-1].cuda_graph.replays == steps - 1, result.report
    monkeypatch.setattr(loop, "loop_prefetch", lambda device, record: None)
    expected, parameters = fitted(BATCHES, **options)
    same(found, parameters)
    assert [entry["loss"] for entry in result.history] == [entry["loss"] for entry in expected.history]


@pinned
@pytest.mark.parametrize("wait", ["filled", "consumed"])
def test_a_missing_wait_is_seen_in_fit(device, by_operators, monkeypatch, wait):
    if wait == "filled":
        monkeypatch.setattr(HostRecorder, "read_after", lambda self, event, memory: None)
    else:
        monkeypatch.setattr(HostCopyStream, "wait", lambda self, event: None)
    with pytest.raises(MissingWait):
        fitted(BATCHES)


class Broken(IterableDataset):
    """Raises in place of a batch."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __iter__(self):
        for batch in BATCHES[:4]:
            self.seen.append(len(self.seen))
            yield batch
        raise OSError("the disk is full")


@pinned
def test_an_exception_in_the_loader_is_raised_after_the_step_before(device, by_operators, monkeypatch):
    advanced: list[Any] = []
    monkeypatch.setattr(loop.Bar, "advance", lambda self, loss: advanced.append(float(loss)))
    net, seen = model(), []
    with pytest.raises(OSError, match="disk is full"):
        sidefx_train.fit(net, DataLoader(Broken(seen), batch_size=None), accelerator="cpu", progress=False)
    reference = model()
    optimizer = torch.optim.AdamW(reference.parameters())
    for x, y in BATCHES[:4]:
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(advanced) == len(seen) == 4
    for one, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = model(), []

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Changing(Module):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [t * 1 for t in batch]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(BATCHES)


def trained(module: Module, data: Any) -> Any:
    callback = sidefx_train.SideFXCompile(backend="aot_eager", warmup="now", keep_slower=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=[callback], barebones=False, **quiet
    )
    trainer.fit(module, DataLoader(data, batch_size=None))
    assert "batch_to_device" not in vars(trainer.strategy)
    return callback.report


@pinned
def test_lightning_prefetches_what_its_fetcher_has(device, monkeypatch):
    module, plain, changing = Module(), Module(), Changing()
    record = trained(module, Stream()).prefetches
    count = len(BATCHES) - 1
    assert (record.prefetched, record.used, record.dropped) == (count, count, {}), record
    assert trained(changing, Stream()).prefetches == PrefetchRecord()
    assert trained(plain, BATCHES).prefetches == PrefetchRecord(), "the fetcher of a sized loader has no batch ready"
    same(*[[p.detach() for p in each.parameters()] for each in (module, plain)])
    same(*[[p.detach() for p in each.parameters()] for each in (module, changing)])
