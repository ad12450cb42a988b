"""Trains a character-level GPT on Python's own standard library with Lightning: eager, then captured.

``make train`` runs this. Both fits start from the same seed and see the same batches; the table at the end puts their
losses and speeds side by side. Writes ``runs/quickstart/report.html`` and, where wandb is installed, an offline run.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import statistics
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import page
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from sidefx_train import SideFXCompile, StepReport

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
LENGTH = 64
"""Characters that the model sees at once."""


# ---------------------------------------------------------------------- data
def corpus(characters: int = 2_000_000) -> torch.Tensor:
    """The standard library's sources as indices into ``ALPHABET``."""
    known = {character: index for index, character in enumerate(ALPHABET)}
    indices: list[int] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore").replace("\t", "    ")
        indices.extend(known[character] for character in text if character in known)
        if len(indices) >= characters:
            break
    return torch.tensor(indices[:characters])


class Crops(IterableDataset):
    """Endless random crops: ``(characters, next characters)``, the same for every run."""

    def __init__(self, text: torch.Tensor, rows: int) -> None:
        self.text, self.rows = text, rows

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        window = torch.arange(LENGTH + 1)
        while True:
            starts = torch.randint(0, len(self.text) - LENGTH - 1, (self.rows, 1), generator=generator)
            crop = self.text[starts + window]
            yield crop[:, :-1].contiguous(), crop[:, 1:].contiguous()


# ---------------------------------------------------------------------- model
class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class CharGPT(L.LightningModule):
    """A small GPT. Nothing in it knows of sidefx_train."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 4, steps: int = 1000) -> None:
        super().__init__()
        self.steps = steps
        self.embed, self.position = nn.Embedding(len(ALPHABET), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET))
        self.characters_seen = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        ids, targets = batch
        loss = F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
        self.characters_seen += ids.numel()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def write(self, prompt: str, count: int, temperature: float = 0.7) -> str:
        """Continues ``prompt``."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.tensor([[ALPHABET.index(character) for character in prompt]])
        for _ in range(count):
            probabilities = (self(ids[:, -LENGTH:])[0, -1] / temperature).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)[None]], dim=1)
        return "".join(ALPHABET[index] for index in ids[0])


# ---------------------------------------------------------------------- one fit
@dataclass
class Recorder(Callback):
    """Loss and wall time of every step."""

    losses: list[torch.Tensor] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])
        self.ends.append(time.perf_counter())


@dataclass
class Fit:
    """What one fit left behind; times in seconds."""

    name: str
    model: CharGPT
    losses: list[float]
    step_seconds: list[float]
    report: StepReport | None = None

    @property
    def first(self) -> float:
        return self.step_seconds[0]

    @property
    def steps_per_second(self) -> float:
        """Of the median step in the second half of the fit; without steps that waited for the compiled graph."""
        half, eager = len(self.step_seconds) // 2, self.report.fallback_count if self.report else 0
        return 1.0 / statistics.median(self.step_seconds[max(half, eager) :] or self.step_seconds[half:])

    @property
    def total(self) -> float:
        return sum(self.step_seconds)


def fit(name: str, text: torch.Tensor, args: argparse.Namespace, compiler: SideFXCompile | None) -> Fit:
    L.seed_everything(0, verbose=False)
    model = CharGPT(steps=args.steps)
    recorder = Recorder()
    trainer = L.Trainer(
        max_epochs=1,
        limit_train_batches=args.steps,
        callbacks=[recorder, RichProgressBar(refresh_rate=25), *([compiler] if compiler else [])],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        accelerator="cpu" if args.cpu else "auto",
        devices=1,
    )
    trainer.fit(model, DataLoader(Crops(text, args.rows), batch_size=None))
    seconds = [end - start for start, end in zip(recorder.ends, recorder.ends[1:], strict=False)]
    losses = torch.stack(recorder.losses).tolist()
    return Fit(name, model, losses, seconds, compiler.report if compiler else None)


# ---------------------------------------------------------------------- what is shown
def figures(eager: Fit, ours: Fit) -> list[tuple[str, str, str]]:
    """Rows of the final table: name, eager, captured."""
    report = ours.report
    assert report is not None, "the captured fit has a report"
    speed_up = ours.steps_per_second / eager.steps_per_second
    rows = [
        ("steps per second (median)", f"{eager.steps_per_second:.1f}", f"{ours.steps_per_second:.1f}"),
        ("speed-up", "1.00", f"{speed_up:.2f}"),
        ("first step, seconds", f"{eager.first:.2f}", f"{ours.first:.2f}"),
        ("whole fit, seconds", f"{eager.total:.1f}", f"{ours.total:.1f}"),
    ]
    last = len(eager.losses) - 1
    for step in sorted({0, last // 4, last // 2, last * 3 // 4, last}):
        rows.append((f"loss at step {step}", f"{eager.losses[step]:.5f}", f"{ours.losses[step]:.5f}"))
    rows += [
        ("characters seen (a Python counter)", str(eager.model.characters_seen), str(ours.model.characters_seen)),
        ("graphs", "-", str(report.graph_count)),
        ("breaks", "-", str(len(report.breaks))),
        ("recaptures", "-", str(len(report.recaptures))),
        ("steps that ran eagerly", str(len(eager.losses)), str(report.fallback_count)),
    ]
    return rows


def show(console: Console, rows: list[tuple[str, str, str]], sample: str) -> None:
    table = Table(title="the same training, twice", title_style="bold")
    table.add_column("")
    table.add_column("eager", justify="right")
    table.add_column("SideFXCompile", justify="right")
    for row in rows:
        table.add_row(*row, style="bold green" if row[0] == "speed-up" else None)
    console.print(table)
    console.print(Panel(Text(sample), title="written by the trained model"))


def thin(values: list[float], count: int = 300) -> list[tuple[float, float]]:
    """About ``count`` points: medians of neighbors, so that curves can be read."""
    width = max(1, len(values) // count)
    return [(float(at), statistics.median(values[at : at + width])) for at in range(0, len(values), width)]


def write_page(path: Path, eager: Fit, ours: Fit, rows: list[tuple[str, str, str]], sample: str) -> None:
    both = (eager, ours)
    times = {f.name: page.bands([1e3 * seconds for seconds in f.step_seconds[1:]]) for f in both}
    page.write(
        path,
        "sidefx_train quickstart",
        [
            page.table(("", "eager", "SideFXCompile"), rows),
            page.chart("Loss", {f.name: thin(f.losses) for f in both}, "step", "loss"),
            page.chart(
                "Step time: median, 10th to 90th percentile (first step left out)",
                {name: [(x, middle) for x, _, middle, _ in found] for name, found in times.items()},
                "step",
                "milliseconds",
                {name: [(x, low, high) for x, low, _, high in found] for name, found in times.items()},
                logarithmic=True,
            ),
            page.text("Written by the trained model", sample),
            "<h2>Capture report</h2>" + ours.report.to_html(),
        ],
    )


def log_to_wandb(folder: Path, eager: Fit, ours: Fit) -> str | None:
    """An offline W&B run; ``None`` where wandb is not installed."""
    if importlib.util.find_spec("wandb") is None:
        return None
    import wandb

    run = wandb.init(
        project="sidefx-train-quickstart", mode="offline", dir=folder, settings=wandb.Settings(silent=True)
    )
    for step, (a, b) in enumerate(zip(eager.losses, ours.losses, strict=True)):
        run.log({"loss/eager": a, "loss/captured": b, "step_ms/captured": 1e3 * ours.step_seconds[step]}, step=step)
    run.summary["speed_up"] = ours.steps_per_second / eager.steps_per_second
    where = str(Path(run.dir).parent)
    run.finish()
    return where


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rows", type=int, default=8, help="crops in a batch")
    parser.add_argument("--backend", default="inductor", help="backend of the captured step")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU where there is a GPU")
    args = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*litlogger.*")

    console = Console()
    text = corpus()
    console.print(f"{len(text):,} characters of the standard library, {args.steps} steps of {args.rows} x {LENGTH}")
    console.rule("eager")
    eager = fit("eager", text, args, None)
    console.rule("captured: Trainer(callbacks=[SideFXCompile()])")
    ours = fit("SideFXCompile", text, args, SideFXCompile(backend=args.backend))

    sample = ours.model.write("def ", 400)
    rows = figures(eager, ours)
    show(console, rows, sample)
    write_page(args.out / "report.html", eager, ours, rows, sample)
    console.print(f"report: {args.out / 'report.html'}")
    if where := log_to_wandb(args.out, eager, ours):
        console.print(f"offline W&B run: {where}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
