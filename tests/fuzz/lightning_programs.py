"""Random Lightning programs, with changes between batches and inside steps; eager against captured.

``python -m tests.fuzz.lightning_programs FIRST COUNT`` runs many and prints those that differ.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
import torchmetrics  # noqa: F401 - programs use it
from lightning import pytorch as pl

import sidefx_train
from tests.support.parity import photograph, same

HEAD = """
import functools
import torch, torchmetrics
from lightning import pytorch as pl
from torch.nn import functional as F


class Called:
    def __init__(self, owner, name): self.owner, self.name = owner, name
    def __call__(self, *args, **kwargs): self.owner.events.append((self.name, len(args)))


class Late(pl.Callback):
    def __init__(self): self.count = 0
    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.count += 1
        module.events.append(("late", self.count))


def wrapped(owner, name):
    hook = getattr(owner, name)
    @functools.wraps(hook)
    def timed(*args, **kwargs):
        (owner.events if hasattr(owner, "events") else EVENTS).append(("wrapped", name))
        return hook(*args, **kwargs)
    object.__setattr__(owner, name, timed)


EVENTS = []
"""

LOGS = [
    'self.log("loss", loss)',
    'self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)',
    'self.log("rows", float(len(x)))',
    'self.log("top", loss.detach() * 2, reduce_fx="max", on_epoch=True)',
    "self.log_dict(self.stats)",
    'self.log_dict({"a": loss, "b": 2.0}, on_epoch=True)',
    'self.log_dict({k + "_": v for k, v in self.stats.items()})',
    'self.stats["s"] = loss.detach(); self.log_dict(self.stats)',
    'self.log("acc", self.accuracy(out, y))',
    'self.accuracy(out, y); self.log("metric", self.accuracy)',
    'self.log("seen", float(self.seen), batch_size=2)',
]
WRONG_LOGS = [
    'self.log("matrix", out)',
    'self.log("nested", {"a": {"b": 1.0}})',
    'self.log("loss", loss, on_step=False, on_epoch=False)',
    'self.log("text", "x")',
]
READS = [
    "self.events.append(sorted(self.trainer.callback_metrics))",
    "self.events.append({k: float(v) for k, v in self.trainer.logged_metrics.items()})",
    "self.events.append(self.trainer.global_step)",
    "self.events.append(self._current_fx_name)",
    "self.events.append(self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer_steps)",
]
EFFECTS = [
    "self.seen += 1",
    "self.events.append(self.seen)",
    "self.scale = 0.5 if self.seen % 3 else 1.0",
    "self.stats['n'] = float(self.seen)",
]
LOSSES = [
    "loss = F.cross_entropy(out, y)",
    "loss = F.cross_entropy(out, y) * self.scale",
    "loss = F.cross_entropy(out, y) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())",
    "loss = F.cross_entropy(out, y) / (1 + batch_idx)",
]
RETURNS = [
    "return loss",
    "return loss",
    "return loss",
    "return {'loss': loss, 'out': out.detach(), 'n': [1, batch_idx]}",
    "return None if self.seen % 4 == 3 else loss",
]
HOOKS = {
    "on_before_zero_grad": "self, optimizer",
    "on_before_backward": "self, loss",
    "on_after_backward": "self",
    "on_before_optimizer_step": "self, optimizer",
}
OVERRIDES = {
    "optimizer_step": (
        "self, epoch, batch_idx, optimizer, optimizer_closure",
        [
            "optimizer.step(closure=optimizer_closure)",
            "optimizer_closure(); optimizer_closure(); optimizer.step()",
            "loss = optimizer_closure(); self.events.append(type(loss).__name__); optimizer.step()",
            "super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure); self.events.append(batch_idx)",
            "optimizer.step(closure=optimizer_closure); self.log('stepped', 1.0)",
            "optimizer_closure() if batch_idx % 2 else optimizer.step(closure=optimizer_closure)",
        ],
    ),
    "optimizer_zero_grad": (
        "self, epoch, batch_idx, optimizer",
        [
            "optimizer.zero_grad(set_to_none=False)",
            "super().optimizer_zero_grad(epoch, batch_idx, optimizer); self.events.append(batch_idx)",
        ],
    ),
    "backward": ("self, loss, *args, **kwargs", ["loss.backward()", "(loss * 2).backward()"]),
    "configure_gradient_clipping": (
        "self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None",
        [
            "self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm='norm')",
            "self.events.append(gradient_clip_val)",
            "super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)",
        ],
    ),
    "clip_gradients": (
        "self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None",
        [
            "[p.grad.clamp_(-0.01, 0.01) for p in self.parameters() if p.grad is not None]",
            "super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm); self.seen += 1",
        ],
    ),
    "log": (
        "self, name, value, **options",
        ["super().log('own/' + name, value, **options)", "self.seen += 1; super().log(name, value, **options)"],
    ),
}
CHANGES = [
    "self.trainer.gradient_clip_val = {number}",
    "self.trainer.gradient_clip_val = None",
    "self.trainer.gradient_clip_algorithm = {algorithm!r}",
    "self.trainer.callbacks.append(Late())",
    "self.trainer.callbacks[:] = [c for c in self.trainer.callbacks if not isinstance(c, (Late, First))]",
    "self.{hook} = lambda *args: self.events.append('set {hook}')",
    "vars(self).pop({hook!r}, None)",
    "object.__setattr__(self, {hook!r}, Called(self, {hook!r}))",
    "wrapped(self, {hook!r})",
    "wrapped(self, {override!r})",
    "self.training_step = self.other_step",
    "vars(self).pop('training_step', None)",
    "self.trainer.strategy.optimizers = [torch.optim.{optimizer}(self.parameters(), lr=0.05)]",
    "self.trainer.accumulate_grad_batches = {count}",
    "self.trainer.optimizers[0].param_groups[0]['lr'] = {number}",
    "self.net[0].weight.requires_grad_(not self.net[0].weight.requires_grad)",
    "self.scale = {number}",
    "self.stats = {{'a': {number}}}",
    "self.stats.pop('a', None)",
    "self.net.eval() if self.net.training else self.net.train()",
]
OPTIMIZERS = ["SGD", "Adam", "AdamW", "RMSprop", "NAdam"]


def generate(number: int) -> str:
    """Returns the source of program ``number``: ``make()``, ``callbacks()`` and ``OPTIONS``."""
    pick = random.Random(number)

    def some(pool: list[str], most: int) -> list[str]:
        return [pick.choice(pool) for _ in range(pick.randint(0, most))]

    def change() -> str:
        return pick.choice(CHANGES).format(
            number=pick.choice([0.001, 0.1, 0.5, 1.0]),
            algorithm=pick.choice(["norm", "value"]),
            hook=pick.choice(list(HOOKS)),
            override=pick.choice([name for name in OVERRIDES if name != "log"] + ["training_step"]),
            optimizer=pick.choice(OPTIMIZERS),
            count=pick.choice([1, 2, 3]),
        )

    def step(name: str) -> list[str]:
        body = ["x, y = batch", "out = self(x)", pick.choice(LOSSES)]
        lines = [*some(LOGS, 3), *some(EFFECTS, 2), *some(READS, 1)]
        if pick.random() < 0.05:
            lines.append(pick.choice(WRONG_LOGS))
        if pick.random() < 0.05:
            lines.append(
                f"try: {pick.choice(WRONG_LOGS)}\n        except Exception as e: self.events.append(str(e)[:40])"
            )
        if pick.random() < 0.1:
            lines.append(f"if self.seen == 3: {change()}")
        pick.shuffle(lines)
        return [
            f"    def {name}(self, batch, batch_idx):",
            *(f"        {line}" for line in [*body, *lines, pick.choice(RETURNS)]),
        ]

    manual = pick.random() < 0.15
    lines = ["class Net(pl.LightningModule):", "    def __init__(self):", "        super().__init__()"]
    drop = ", torch.nn.Dropout(0.2)" if pick.random() < 0.1 else ""
    lines += [
        f"        self.net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(){drop}, torch.nn.Linear(5, 3))",
        "        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, validate_args=False)",
        "        self.seen, self.scale, self.stats, self.events = 0, 1.0, {'a': 1.5}, []",
        f"        self.automatic_optimization = {not manual}",
        "    def forward(self, x):",
        "        return self.net(x)",
    ]
    if manual:
        for name in ("training_step", "other_step"):
            body = step(name)[:-1]
            lines += [*body, "        optimizer = self.optimizers()", "        optimizer.zero_grad()"]
            lines += ["        self.manual_backward(loss)"]
            if pick.random() < 0.3:
                lines += ["        self.clip_gradients(optimizer, gradient_clip_val=0.1)"]
            lines += ["        optimizer.step()", pick.choice(["        return loss", "        pass"])]
    else:
        lines += step("training_step") + step("other_step")
    lines += ["    def configure_optimizers(self):"]
    lines += [f"        optimizer = torch.optim.{pick.choice(OPTIMIZERS)}(self.parameters(), lr=0.05)"]
    if pick.random() < 0.2:
        lines += ["        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)"]
        lines += ["        return [optimizer], [{'scheduler': schedule, 'interval': 'step'}]"]
    else:
        lines += ["        return optimizer"]
    for name, arguments in HOOKS.items():
        if pick.random() < 0.2:
            body = [*some(EFFECTS, 2), *some(READS, 1), f"self.events.append({name!r})"]
            if pick.random() < 0.2:
                body.append(f"self.log({name!r}, float(self.seen))")
            if pick.random() < 0.2:
                body.append(f"if self.seen == 2: {change()}")
            lines += [f"    def {name}({arguments}):", *(f"        {line}" for line in body)]
    for name, (arguments, bodies) in OVERRIDES.items():
        if pick.random() < 0.1 and not (manual and name != "log"):
            lines += [f"    def {name}({arguments}):", f"        {pick.choice(bodies)}"]
    lines += ["    def on_train_batch_start(self, batch, batch_idx):", "        at = (self.current_epoch, batch_idx)"]
    for _ in range(pick.randint(0, 4)):
        lines += [f"        if at == ({pick.randint(0, 1)}, {pick.randint(0, 3)}): {change()}"]
    lines += ["", "class First(pl.Callback):", "    def __init__(self): self.events = []"]
    for name, arguments in HOOKS.items():
        if pick.random() < 0.25:
            given = arguments.replace("self", "self, trainer, module")
            body = pick.choice(
                [
                    f"self.events.append({name!r})",
                    "module.events.append(len(trainer.callback_metrics))",
                    f"module.log('first/{name}', 1.0)",
                    "module.seen += 1",
                ]
            )
            lines += [f"    def {name}({given}): {body}"]
    lines += ["def callbacks():", f"    return {pick.choice(['[]', '[First()]', '[First(), Late()]', '[Late()]'])}", ""]
    options: dict[str, Any] = {"max_epochs": pick.choice([1, 2])}
    if not manual and pick.random() < 0.3:
        options |= {
            "gradient_clip_val": pick.choice([0.01, 1.0]),
            "gradient_clip_algorithm": pick.choice(["norm", "value"]),
        }
    if not manual and pick.random() < 0.25:
        options["accumulate_grad_batches"] = pick.choice([2, 3])
    if pick.random() < 0.1:
        options["profiler"] = "simple"
    lines += [f"OPTIONS = {options!r}", f"ROWS = {pick.choice([16, 16, 14])}"]
    return HEAD + "\n".join(lines) + "\n"


def check(source: str, backend: str = "eager") -> Any:
    """Fits natively and captured; returns the callback's report.

    Raises:
        AssertionError: something differs.
    """
    native, _ = _fit(source, None)
    ours, report = _fit(source, backend)
    same(native, ours, "fit", True)
    return report


def _fit(source: str, backend: str | None) -> tuple[Any, Any]:
    space: dict[str, Any] = {"__name__": "fuzz_lightning"}
    module_type = type(sys)("fuzz_lightning")
    sys.modules["fuzz_lightning"] = module_type
    exec(compile(source, "<fuzz program>", "exec"), vars(module_type))
    space = vars(module_type)
    torch.manual_seed(0)
    module = space["Net"]()
    generator = torch.Generator().manual_seed(3)
    x, y = (
        torch.randn(space["ROWS"], 4, generator=generator),
        torch.randint(0, 3, (space["ROWS"],), generator=generator),
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    ours = [] if backend is None else [sidefx_train.SideFXCompile(backend=backend, warmup="now", rng="eager")]
    callbacks = space["callbacks"]()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    quiet |= {"enable_model_summary": False, "default_root_dir": tempfile.gettempdir(), "accelerator": "cpu"}
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**quiet, **space["OPTIONS"], callbacks=[*callbacks, *ours])
        try:
            trainer.fit(module, loader)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    rows = {}
    if space["OPTIONS"].get("profiler"):
        found = trainer.profiler.recorded_durations
        rows = {name: len(times) for name, times in found.items() if "SideFXCompile" not in name}
    state = {
        "error": error,
        "weights": dict(module.state_dict()),
        "grads": [p.grad for p in module.parameters()],
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "metrics": [dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)],
        "results": sorted(map(str, trainer.fit_loop.epoch_loop._results)),
        "progress": trainer.fit_loop.state_dict(),
        "python": [module.seen, module.scale, module.stats, module.events, space["EVENTS"]],
        "callbacks": [getattr(c, "events", None) for c in callbacks],
        "random": torch.get_rng_state(),
        "profiled": rows,
    }
    return photograph(state), ours[0].report if ours else None


def main(first: int, count: int) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    began, differ, calls, replays, broken = time.time(), 0, 0, 0, 0
    for number in range(first, first + count):
        try:
            report = check(generate(number))
        except AssertionError as error:
            differ += 1
            print(f"=== seed {number} differs: {str(error)[:300]}", flush=True)
            continue
        except Exception as error:
            broken += 1
            print(f"=== seed {number} raises {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        calls, replays = calls + report.calls, replays + report.replays
    seconds = time.time() - began
    told = f"seeds {first} to {first + count - 1}: {differ} differ, {broken} raise"
    print(f"{told}; {replays} of {calls} calls replayed; {seconds:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
