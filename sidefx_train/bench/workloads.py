"""The trained models, each from a fixed seed with four fixed batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from sidefx_train.bench.large_models import Llama, ResNet

BATCHES = 4
"""Distinct batches, cycled."""

LR, LR_LARGE, WEIGHT_DECAY = 1e-3, 1e-4, 1e-2
SGD_LR, SGD_LR_LARGE, SGD_MOMENTUM = 1e-2, 1e-3, 0.9

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Tolerance:
    """Largest differences from eager's results that count as right.

    Attributes:
        loss: absolute difference of any of the first eight losses.
        parameters: distance from eager's parameters after eight steps, relative to the distance that eager covered.
            Adam divides by the root of tiny second moments in its first steps, which amplifies rounding of the last bit
            to such distances.
    """

    loss: float
    parameters: float


FLOAT32 = Tolerance(loss=1e-4, parameters=1e-2)
BFLOAT16 = Tolerance(loss=5e-2, parameters=0.15)


class MakeOptimizer(Protocol):
    """Makes an optimizer over a model's parameters; ``capturable`` ones can be recorded in a CUDA graph."""

    def __call__(self, fused: bool, capturable: bool = False) -> torch.optim.Optimizer: ...


@dataclass(frozen=True)
class Workload:
    """A model with its loss, data and optimizer.

    Attributes:
        model: in training mode, initialized from seed 0.
        loss: ``loss(model, batch)`` -> scalar.
        batches: ``(input, target)`` pairs.
        optimizer: ``optimizer(fused)`` -> torch optimizer over the model's parameters.
        tolerance: what counts as eager's result.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batches: list[Batch]
    optimizer: MakeOptimizer
    tolerance: Tolerance = FLOAT32


class Attention(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_mix, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.before_mix(x)).split(width, 2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class GPT(nn.Module):
    """GPT-2's architecture; ``tied``: the head is the embedding, initialized as GPT-2's."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            nn.init.normal_(self.embed.weight, std=0.02)
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


class CNN(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        inputs = (widths[0], *widths[:-1])
        self.blocks = nn.ModuleList(
            Residual(i, o, 1 if index == 0 else 2) for index, (i, o) in enumerate(zip(inputs, widths, strict=True))
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class LSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def bfloat16_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """:func:`classification_loss` under autocast."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return classification_loss(model, batch)


def _adamw(model: nn.Module, lr: float = LR) -> MakeOptimizer:
    def make(fused: bool, capturable: bool = False) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(), lr, weight_decay=WEIGHT_DECAY, fused=fused or None, capturable=capturable
        )

    return make


def _sgd(model: nn.Module, lr: float = SGD_LR) -> MakeOptimizer:
    def make(fused: bool, capturable: bool = False) -> torch.optim.Optimizer:  # SGD has no counter on the host
        return torch.optim.SGD(model.parameters(), lr, momentum=SGD_MOMENTUM, fused=fused or None)

    return make


def _batches(make: Callable[[torch.Generator], Batch]) -> list[Batch]:
    """Returns batches on the CPU, also where models are built on another device."""
    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"):
        return [make(generator) for _ in range(BATCHES)]


def _tokens(vocabulary: int, rows: int, length: int) -> list[Batch]:
    """Returns ids of shape ``[rows, length]``, with the next ones as flat targets."""

    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1)

    return _batches(batch)


def _labelled(*shape: int) -> list[Batch]:
    return _batches(
        lambda g: (torch.randn(*shape, generator=g), torch.randint(0, 10, (shape[0],), generator=g)),
    )


def mlp(width: int, layers: int, rows: int) -> Workload:
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(width, 10))
    return Workload(model, classification_loss, _labelled(rows, width), _adamw(model))


def gpt(vocabulary: int, width: int, heads: int, layers: int, length: int, rows: int) -> Workload:
    model = GPT(vocabulary, width, heads, layers, length)
    return Workload(model, classification_loss, _tokens(vocabulary, rows, length), _adamw(model))


def gpt2(vocabulary: int, width: int, heads: int, layers: int, length: int, rows: int) -> Workload:
    """GPT-2 with tied weights in bfloat16."""
    model = GPT(vocabulary, width, heads, layers, length, tied=True)
    return Workload(model, bfloat16_loss, _tokens(vocabulary, rows, length), _adamw(model, LR_LARGE), BFLOAT16)


def llama(vocabulary: int, width: int, heads: int, layers: int, hidden: int, length: int, rows: int) -> Workload:
    model = Llama(vocabulary, width, heads, layers, hidden, length)
    return Workload(model, bfloat16_loss, _tokens(vocabulary, rows, length), _adamw(model, LR_LARGE), BFLOAT16)


def resnet(depths: tuple[int, ...], width: int, size: int, rows: int) -> Workload:
    """A ResNet on square images of ``size`` pixels, channels-last in bfloat16."""
    model = ResNet(depths, width, classes=1000).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in _labelled(rows, 3, size, size)]
    return Workload(model, bfloat16_loss, batches, _sgd(model, SGD_LR_LARGE), BFLOAT16)


def cnn(widths: tuple[int, ...], rows: int) -> Workload:
    model = CNN(widths)
    return Workload(model, classification_loss, _labelled(rows, 3, 32, 32), _sgd(model))


def lstm(width: int, length: int, rows: int) -> Workload:
    model = LSTM(width)
    return Workload(model, classification_loss, _labelled(rows, length, width), _adamw(model))


def hf_gpt2(vocabulary: int, width: int, heads: int, layers: int, length: int, rows: int) -> Workload:
    try:
        import transformers
    except ImportError as error:
        raise Unavailable("transformers is not installed") from error

    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)

    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)[:, :-1].contiguous()
        return ids, ids  # the model shifts labels itself

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(input_ids=batch[0], labels=batch[1]).loss

    return Workload(model, loss, _batches(batch), _adamw(model))


class Unavailable(Exception):
    """The workload or contender cannot run here; the text says why."""


CORE: dict[str, Callable[[], Workload]] = {
    "mlp_tiny": lambda: mlp(width=64, layers=4, rows=32),
    "mlp_big": lambda: mlp(width=512, layers=8, rows=128),
    "gpt_tiny": lambda: gpt(vocabulary=256, width=64, heads=4, layers=4, length=32, rows=4),
    "gpt_small": lambda: gpt(vocabulary=256, width=256, heads=8, layers=6, length=128, rows=8),
    "cnn_small": lambda: cnn(widths=(16, 32, 64), rows=32),
    "lstm": lambda: lstm(width=128, length=32, rows=32),
    "hf_gpt2_tiny": lambda: hf_gpt2(vocabulary=1000, width=64, heads=4, layers=2, length=64, rows=4),
}

MEMORY: dict[str, Callable[[], Workload]] = {
    "gpt_small": CORE["gpt_small"],
    "gpt_long": lambda: gpt(vocabulary=256, width=256, heads=8, layers=6, length=512, rows=8),
    "cnn_small": CORE["cnn_small"],
}
"""Workloads whose activations are many times larger than their parameters."""

LAUNCH: dict[str, Callable[[], Workload]] = {
    "mlp_tiny": CORE["mlp_tiny"],
    "gpt_tiny": CORE["gpt_tiny"],
    "gpt_launch": lambda: gpt(vocabulary=256, width=256, heads=8, layers=12, length=128, rows=4),
}
"""Workloads in float32 of which a GPU computes a step in less time than Python needs to launch its kernels."""

LARGE: dict[str, Callable[[], Workload]] = {
    "gpt2_124m": lambda: gpt2(vocabulary=50257, width=768, heads=12, layers=12, length=1024, rows=8),
    "llama_300m": lambda: llama(vocabulary=32000, width=1024, heads=16, layers=18, hidden=2816, length=1024, rows=4),
    "resnet50": lambda: resnet(depths=(3, 4, 6, 3), width=64, size=224, rows=64),
}
"""Workloads under bfloat16 autocast that keep a GPU busy."""

SUITES: dict[str, dict[str, Callable[[], Workload]]] = {
    "core": CORE,
    "memory": MEMORY,
    "launch": LAUNCH,
    "large": LARGE,
    "gpu": {**LAUNCH, **LARGE},
    "distributed": {name: CORE[name] for name in ("gpt_tiny", "gpt_small", "cnn_small")},
}

DEVICE_GIB = {**dict.fromkeys(LAUNCH, 0.7), "gpt2_124m": 8.0, "llama_300m": 10.0, "resnet50": 4.0}
"""Estimated GiB of device memory per contender while several run their first steps, whose peaks do not coincide."""

GOALS = {
    "mlp_tiny": 5.0,
    "mlp_big": 2.4,
    "gpt_tiny": 2.2,
    "gpt_small": 1.5,
    "cnn_small": 1.7,
    "lstm": 1.1,
    "hf_gpt2_tiny": 2.0,
}
"""Required speed-ups of a captured step over eager."""


def train_step(model: nn.Module, workload: Workload, optimizer: torch.optim.Optimizer) -> Step:
    """Returns the training step of a workload as people write it, with its model or a wrapper of it."""
    loss_of = workload.loss

    def train_step(batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def build(suite: str, name: str, device: str = "cpu") -> Workload:
    """Returns a workload on a device, always with the same weights and batches."""
    torch.manual_seed(0)
    with torch.device(device):
        workload = SUITES[suite][name]()
    workload.model.train()
    return replace(workload, batches=[(x.to(device), y.to(device)) for x, y in workload.batches])


def names(suite: str) -> list[str]:
    return list(SUITES[suite])


def parameters(model: nn.Module) -> torch.Tensor:
    """Returns all parameters and floating buffers in one vector on the CPU; sharded ones are gathered."""
    values = [_whole(p).detach() for p in model.parameters()] + [b for b in model.buffers() if b.is_floating_point()]
    return torch.cat([value.float().flatten().cpu() for value in values])


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    """Returns a parameter, gathered from all processes if it is a ``DTensor``."""
    gather: Callable[[], torch.Tensor] | None = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()
