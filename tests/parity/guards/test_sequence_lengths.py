"""Models on sequences whose length changes from batch to batch: one graph for all lengths, under Inductor too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tests.support.parity import Program, parity

LENGTHS = [6, 9, 10, 7, 12, 5]
WIDTH, WORDS = 8, 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(32, WIDTH) / 4)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, stride=2)
        self.transposed = nn.ConvTranspose1d(WIDTH, WIDTH, 3, stride=2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.pairs, self.bias = nn.Parameter(torch.randn(5, WIDTH, WIDTH) / WIDTH), nn.Parameter(torch.zeros(5))


def attention_with_weights(net, x, h):
    made, weights = net.attention(h, h, h, key_padding_mask=x == 0)
    return made.square().mean() + weights.square().mean()


def language_model(net, x, h):
    size = x.shape[1]
    mask = torch.triu(torch.full((size, size), -math.inf), 1)
    made, _ = net.attention(h, h, h, attn_mask=mask, need_weights=False)
    return F.cross_entropy(net.head(made)[:, :-1].reshape(-1, WORDS), x[:, 1:].reshape(-1))


def products_of_times(net, x, h):
    return torch.einsum("btd,bsd->bts", h, h).softmax(-1).square().mean()


def rotated(net, x, h):
    angles = torch.arange(h.shape[1])[:, None] * 10000 ** (-torch.arange(WIDTH // 2) / WIDTH)
    a, b = h.chunk(2, -1)
    h = torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
    return (h @ h.transpose(1, 2)).softmax(-1).square().mean()


def added_products(net, x, h):
    times = h.transpose(1, 2)
    one = torch.baddbmm((x == 0).float().unsqueeze(1), h, times, beta=2, alpha=0.5)
    return (one.square().mean() + torch.addbmm(h[0, :, :1], h, times).square().mean()) / 1000


def convolution(net, x, h):
    return net.norm(net.convolution(h.transpose(1, 2))).square().mean()


def convolutions(net, x, h):
    return net.transposed(net.convolution(h.transpose(1, 2)).relu()).square().mean()


def padded(net, x, h):
    return net.convolution(F.pad(h.transpose(1, 2), (2, 0))).square().mean() + F.unfold(h[:, None], 3).square().mean()


def spectrum(net, x, h):
    twice = torch.fft.irfft(torch.fft.rfft(h, dim=1) * 2, n=h.shape[1], dim=1)
    return twice.square().mean() + torch.fft.fft2(h).abs().mean()


def short_spectra(net, x, h):
    window, kind = torch.hann_window(4), {"hop_length": 2, "return_complex": True}
    wide = torch.stft(h.sum(-1), 4, window=window, **kind)
    narrow = torch.stft(h.sum(-1), 4, win_length=3, window=window[:3], normalized=True, onesided=False, **kind)
    single = torch.stft(h[0].sum(-1), 4, window=window, **kind)
    return wide.abs().mean() + narrow.abs().square().mean() + single.abs().mean()


def pooled(net, x, h):
    times = h.transpose(1, 2)
    values, places = F.max_pool1d(times, 3, 2, 1, return_indices=True)
    whole = F.max_pool1d(times.detach().relu(), times.shape[2]) + nn.MaxPool1d(h.shape[1])(times)
    return (values * places).mean() + nn.MaxPool1d(3, 1, dilation=2)(times[0, :, :4].repeat(1, 2)).mean() + whole.mean()


def pooled_to_few(net, x, h):
    times = h.transpose(1, 2)
    two = F.adaptive_avg_pool2d(times[:, None], (4, 2)).square().mean()
    return F.adaptive_avg_pool1d(times, 3).square().mean() + F.adaptive_max_pool1d(times, 3).square().mean() + two


def positions_from_numbers(net, x, h):
    size = h.shape[1]
    made = torch.linspace(-1, 1, size) + torch.hann_window(size) + torch.hamming_window(size, False, 0.5)
    return (h * made[:, None]).square().mean()


def broadcast(net, x, h):
    size = h.shape[1]
    numbers = net.positions[:size].detach()
    picked = h[torch.arange(4)[:, None], torch.arange(size)]
    blended = torch.lerp(picked, h[:, :1], numbers[:, :1]) + torch.addcmul(h, h[:, :1], numbers[:, :1])
    phases = torch.polar(torch.ones(size, 4), numbers[:, :4]) * torch.view_as_complex(h.reshape(4, -1, 4, 2))
    mask = (x > 9).unsqueeze(-1).expand_as(h)
    return blended.square().mean() + phases.abs().square().mean() + h.masked_scatter(mask, h.flip(1)).square().mean()


def products_and_joins(net, x, h):
    a, b, c = h[0], h[1, 1:], h[2, 2:]
    blocks = torch.block_diag(a, b.t(), c[:, 0]).square().sum()
    outer = torch.kron(a, b[:, :2]).square().mean() + b[:, 0].kron(a).square().mean()
    pairs = F.bilinear(h, h.flip(1), net.pairs, net.bias) + F.bilinear(h, h, net.pairs)
    return blocks / 100 + outer + pairs.square().mean()


def lists_of_sequences(net, x, h):
    parts = [h[0], h[1, 1:], h[2, 2:]]
    front, behind = pad_sequence(parts, True, 0.5), pad_sequence(parts[::-1], padding_side="left")
    return front.square().mean() + net.head(behind).square().mean()


def cumulative_products(net, x, h):
    few_zeros = h * (x % 7 > 0).unsqueeze(-1)
    made = h.cumprod(1).square().mean() + few_zeros.cumprod(-2).mean()
    return (made + torch.cumprod(x.float(), 0).mean()) / 1000


def written_with_broadcasts(net, x, h):
    a, b = h[:, :1], 1 + h[:, :, :1].square()
    made = h.clone().addcmul_(a, b).addcdiv_(a, b).lerp_(a, 0.25)
    return made.lerp_(b, a).square().mean() / 1000


def tables_in_numpy(net, x, h):
    size = h.shape[1]
    angles = np.arange(size)[:, None] / np.power(100, np.arange(4) / 4)
    table = np.zeros((size, WIDTH), dtype=np.float32)
    table[:, 0::2], table[:, 1::2] = np.sin(angles), np.cos(angles)
    later = torch.from_numpy(np.triu(np.ones((size, size)), k=1).astype("uint8")) == 0
    scores = ((h + torch.from_numpy(table)) @ h.transpose(1, 2)).masked_fill(~later, -math.inf)
    return scores.softmax(-1).square().mean() + h[:, np.arange(size)[::-1].copy()].cos().mean()


MODELS = (
    *(attention_with_weights, language_model, products_of_times, rotated, added_products),
    *(convolution, convolutions, padded, spectrum, short_spectra, pooled, pooled_to_few, positions_from_numbers),
    *(broadcast, products_and_joins, lists_of_sequences, cumulative_products, written_with_broadcasts, tables_in_numpy),
)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("model", MODELS, ids=lambda fn: fn.__name__)
@pytest.mark.covering(1)
def test_one_graph_for_all_lengths(model, backend):
    """Regression: attention with weights, means of products of times, and convolutions whose input needs a gradient
    were a graph for each length; so were padding by a constant, spectra, pooling over time, ``linspace``, lists of
    sequences, products of all pairs, tables that NumPy makes, and under Inductor adaptive pooling."""

    def make() -> Program:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            loss = model(net, x, net.embedding(x) + net.positions[: x.shape[1]])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def batch(index):
            return (torch.randint(0, WORDS, (4, LENGTHS[index]), generator=torch.Generator().manual_seed(index)),)

        return Program(step, batch, (net, optimizer))

    fixed = torch.__version__ < "2.13"  # its attention and its fake kernels need lengths as numbers
    captures = 3 if model is tables_in_numpy else 2  # the sizes of its arrays are seen to change at the second capture
    parity(make, steps=len(LENGTHS), captures=None if fixed else captures, backend=backend)


def test_items_of_an_array_are_a_capture_for_each_length():
    """Regression: once the array was computed before the graph, ``list(array)`` was a graph break."""

    def make() -> Program:
        layer = nn.Linear(WIDTH, WIDTH)

        def step(x):
            weights = torch.tensor(list(np.arange(x.shape[0])[::-1]))
            loss = sum((layer(x[i]).square().mean() * int(i) for i in np.arange(x.shape[0])), weights.sum())
            loss.backward()
            return loss.detach()

        return Program(step, lambda i: (torch.full((LENGTHS[i], WIDTH), i / 7),), layer)

    parity(make, steps=4, captures=4)


def test_a_tensor_over_a_reversed_array_raises_as_in_eager():
    def make() -> Program:
        def step(x):
            return x * torch.tensor(np.arange(x.shape[0])[::-1])

        return Program(step, lambda i: (torch.ones(LENGTHS[i]),))

    parity(make, steps=3, captures=None, whole=False)
