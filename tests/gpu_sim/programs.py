"""Small training steps with what models and loops of users are made of."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.parity import Program, batches, classifier, mlp, tokens


def mlp_adamw() -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches((5, 6), classes=3))


class Gpt(nn.Module):
    """One block of a language model; the matrix of its embedding is that of its output, too."""

    def __init__(self, vocabulary: int = 11, width: int = 8, heads: int = 2, length: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        x = self.token(ids) + self.position(torch.arange(length, device=ids.device))
        parts = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return self.head(x + self.mlp(self.norm_mlp(x)))


def gpt() -> Program:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(ids, following):
        loss = F.cross_entropy(model(ids).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, tokens(11, 2, 6), (model, optimizer))


def cnn() -> Program:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    return classifier(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches((3, 2, 4, 4), classes=3)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm() -> Program:
    """Cells whose operations a GPU without cuDNN would run one by one."""
    model = Recurrent()
    program = classifier(model, torch.optim.SGD(model.parameters(), lr=0.1), batches((2, 2, 3), classes=3))
    inner = program.step

    def step(x, y):
        with torch.backends.mkldnn.flags(enabled=False):
            return inner(x, y)

    return Program(step, program.batch, program.watch)


def embedding() -> Program:
    """Gradients of rows of a table, of which some are read more than once, and of elements picked by index."""
    table = nn.Embedding(7, 4, padding_idx=0)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)

    def batch(index: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 7, (3, 5), generator=generator), torch.randint(0, 4, (3, 5, 1), generator=generator)

    def step(ids, picked):
        rows = table(ids)
        loss = rows.gather(2, picked).pow(2).mean() + rows[ids[:, 0] % 3].sin().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batch, (table, optimizer))


def dropout() -> Program:
    model = mlp(dropout=0.5)
    return classifier(model, torch.optim.SGD(model.parameters(), lr=0.1), batches((5, 6), classes=3))


def autocast() -> Program:
    """Without a norm of bfloat16 by weights of float32, which torch calls on the CPU only."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batches((4, 8), classes=4), (model, optimizer))


def clipped() -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach(), norm

    return Program(step, batches((5, 6), classes=3), (model, optimizer))


def accumulated() -> Program:
    """Two halves of a batch, whose gradients add up."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        for half, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.cross_entropy(model(half), labels) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step, batches((6, 6), classes=3), (model, optimizer))


def norms() -> Program:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 3)
    )
    return classifier(model, torch.optim.RMSprop(model.parameters(), lr=0.01), batches((3, 2, 6), classes=3))


def scheduled() -> Program:
    """The learning rate of every step is another, and Python code runs behind the graph."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    program = classifier(model, optimizer, batches((5, 6), classes=3))

    def step(x, y):
        loss = program.step(x, y)
        scheduler.step()
        return loss

    return Program(step, program.batch, (model, optimizer))


def averaged() -> Program:
    """Parameters of a second model follow; the learning rate is a tensor."""
    model, average = mlp(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    program = classifier(model, optimizer, batches((5, 6), classes=3))

    def step(x, y):
        loss = program.step(x, y)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        return loss

    return Program(step, program.batch, (model, average, optimizer))


def hooked() -> Program:
    model = mlp()
    calls: list[int] = []
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    model[3].register_full_backward_hook(lambda *args: calls.append(len(args)))
    return classifier(model, torch.optim.SGD(model.parameters(), lr=0.1), batches((5, 6), classes=3), calls)


def measured() -> Program:
    """A metric, a log of numbers, and results that leave the step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = {"right": torch.zeros(()), "seen": 0, "losses": []}

    def step(x, y):
        made = model(x)
        loss = F.cross_entropy(made, y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log["right"] += (made.argmax(1) == y).sum()
        log["seen"] += len(y)
        log["losses"].append(loss.item())
        return loss.detach(), made.detach().softmax(1)

    return Program(step, batches((5, 6), classes=3), (model, optimizer, log))


def sorted_sums() -> Program:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        made = model(x)
        loss = made.cumsum(1).pow(2).mean() + made.sort(1)[0][:, :2].mean() + torch.logcumsumexp(made, 1).mean()
        loss = loss + made.topk(2)[0].mean() + made.std()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batches((5, 6)), (model, optimizer))


def bfloat16() -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batches((5, 8), classes=4), (model, optimizer))


def resized() -> Program:
    """Batches of another size each."""
    program = mlp_adamw()
    return Program(program.step, lambda i: batches((5 + i, 6), classes=3)(i), program.watch)


PROGRAMS = {
    made.__name__: made for made in (mlp_adamw, gpt, cnn, lstm, embedding, dropout, autocast, clipped, accumulated)
}
MORE = {made.__name__: made for made in (norms, scheduled, averaged, hooked, measured, sorted_sums, bfloat16, resized)}
"""Programs that prove less."""
