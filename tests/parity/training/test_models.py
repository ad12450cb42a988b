"""Many model families, trained eagerly and captured: same losses, parameters, buffers and state."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.parity import Program, batches, classifier, mlp, parity, tokens

BACKENDS = ("eager", "inductor")
SLOW_UNDER_INDUCTOR = ("eager", pytest.param("inductor", marks=pytest.mark.slow))
"""For models whose kernels another test compiles: dropout's layers, or those of the GPT in this file."""


class Net(nn.Module):
    """Convolutions with BatchNorm: running statistics and ``num_batches_tracked`` are part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.c2, self.n2 = nn.Conv2d(4, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.n1(self.c1(x)))
        x = F.relu(self.n2(self.c2(x)))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in self.qkv(self.l1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.l2(x))))


class GPT(nn.Module):
    """Tied embeddings: one parameter under two names."""

    def __init__(self, vocabulary: int = 17, width: int = 8, heads: int = 2, layers: int = 2, length: int = 6) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + x * index
        return self.head(x)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.value = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return {"logits": self.classes(hidden), "value": self.value(hidden).squeeze(-1), "name": "two"}


def adamw(model: nn.Module, eps: float = 1e-8) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)


ATTENTION_EPS = 1e-4
"""The gradient of a key bias is zero in exact arithmetic (softmax ignores a shift): with the default ``eps`` Adam turns
the rounding noise of any two correct programs into full steps of opposite signs."""


def train_mlp(dropout: float) -> Program:
    model = mlp(dropout=dropout)
    return classifier(model, adamw(model), batches((5, 6), classes=3))


def train_cnn() -> Program:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return classifier(model, optimizer, batches((4, 2, 6, 6), classes=3))


def train_gpt() -> Program:
    model = GPT()
    optimizer = adamw(model, ATTENTION_EPS)

    def step(ids, targets):
        loss = F.cross_entropy(model(ids), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, tokens(17, 3, 6), (model, optimizer))


def train_lstm() -> Program:
    model = Recurrent()
    return classifier(model, adamw(model), batches((4, 7, 5), classes=3))


def train_stack() -> Program:
    model = Stack()
    return classifier(model, adamw(model), batches((5, 6), classes=3))


def train_dict() -> Program:
    model = TwoHeads()
    optimizer = adamw(model)

    def step(x, y):
        out = model(x)
        loss = F.cross_entropy(out["logits"], y) + (out["value"] ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "name": out["name"], "value": out["value"].detach()}

    return Program(step, batches((5, 6), classes=3), (model, optimizer))


def train_transformers() -> Program:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=23,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.train()
    optimizer = adamw(model, ATTENTION_EPS)
    ids = tokens(23, 3, 8)

    def step(batch):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    # A step does not change the model's own Python attributes (config, generation config): compare what trains.
    watch = ([*model.parameters()], [*model.buffers()], optimizer)
    return Program(step, lambda i: ids(i)[:1], watch)


@pytest.mark.parametrize("backend", SLOW_UNDER_INDUCTOR)
def test_mlp(backend):
    parity(lambda: train_mlp(0.0), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mlp_with_dropout(backend):
    parity(lambda: train_mlp(0.5), backend=backend, rng="eager")


@pytest.mark.parametrize("backend", BACKENDS)
def test_cnn_with_batchnorm(backend):
    parity(train_cnn, backend=backend)


@pytest.mark.parametrize("backend", SLOW_UNDER_INDUCTOR)
def test_gpt_with_tied_embeddings(backend):
    parity(train_gpt, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lstm(backend):
    parity(train_lstm, backend=backend)


@pytest.mark.parametrize("backend", SLOW_UNDER_INDUCTOR)
def test_transformers_gpt2(backend):
    parity(train_transformers, backend=backend)


@pytest.mark.parametrize("backend", SLOW_UNDER_INDUCTOR)
def test_modulelist_loop(backend):
    parity(train_stack, backend=backend)


@pytest.mark.parametrize("backend", SLOW_UNDER_INDUCTOR)
def test_dict_output(backend):
    parity(train_dict, backend=backend)


def test_dropout_fast_draws_another_mask_each_step():
    """``rng="fast"`` may draw other numbers than eager, but never the same mask twice."""
    import sidefx_train

    torch.manual_seed(0)
    drop = nn.Dropout(0.5)
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(x):
        out = drop(x * weight)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return out.detach()

    compiled = sidefx_train.compile(step, backend="inductor", fullgraph=True)
    outs = [compiled(torch.ones(64)) for _ in range(4)]
    kept = [(out != 0).float().mean().item() for out in outs]
    assert all(0.2 < share < 0.8 for share in kept), f"kept shares {kept}"
    assert not any(torch.equal(a, b) for a, b in zip(outs, outs[1:])), "two steps used the same mask"


@pytest.mark.parametrize("writes", [False, True])
def test_pooled_and_flattened_images(writes):
    """A channels-last image cannot be viewed as rows: its layout is converted first."""

    def make() -> Program:
        convolution, head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 49, 3)
        optimizer = torch.optim.SGD([*convolution.parameters(), *head.parameters()], lr=0.1)

        def step(x):
            image = F.max_pool2d(F.relu(convolution(x)), 2)
            rows = image.flatten(1)
            if writes:
                rows.mul_(2)
            loss = head(rows).square().mean() + image.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, lambda i: (torch.randn(2, 3, 16, 16),), (convolution, head, optimizer))

    # Written rows share memory with the image: such a step runs eagerly, with the reason.
    parity(make, steps=3, backend="inductor", whole=not writes, captures=None)


@pytest.mark.slow
def test_pooling_in_a_new_process():
    """Inductor's decomposition of pooling requires that a certain module is already imported."""
    code = (
        "import torch, sidefx_train\n"
        "step = sidefx_train.compile(lambda x: torch.nn.functional.max_pool2d(x * 2, 2), on_failure='raise')\n"
        "x = torch.randn(1, 2, 4, 4)\n"
        "torch.testing.assert_close(step(x), torch.nn.functional.max_pool2d(x * 2, 2))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)
