"""Models on sequences whose length changes from batch to batch: one graph for all lengths, under Inductor too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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


MODELS = (
    *(attention_with_weights, language_model, products_of_times, rotated, added_products),
    *(convolution, convolutions, padded, spectrum, short_spectra, pooled, positions_from_numbers, broadcast),
)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("model", MODELS, ids=lambda fn: fn.__name__)
@pytest.mark.covering(1)
def test_one_graph_for_all_lengths(model, backend):
    """Regression: attention with weights, means of products of times, and convolutions whose input needs a gradient
    were a graph for each length; so were padding by a constant, spectra, pooling over time, and ``linspace``."""

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
    parity(make, steps=len(LENGTHS), captures=None if fixed else 2, backend=backend)
