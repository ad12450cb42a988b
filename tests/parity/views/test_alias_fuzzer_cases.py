"""Programs over views in which a captured step once differed from eager: cases of the alias fuzzer, shortened."""

from __future__ import annotations

import textwrap
import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning
from tests.fuzz.alias_run import check

_WHOLE = "torch.arange(12.0).reshape(3, 4).sin()"

# name: (arguments, step, statements afterwards)
PROGRAMS = {
    "a view from outside that gets another size, and requires gradients then": (  # it crashed the process
        f"x = {_WHOLE}.t()",
        "torch.sin(torch.tensor(1.5), out=x); v = x.expand(2, *x.shape); x.requires_grad_(); "
        "return v, torch._neg_view(x)",
        "attempt('outs[1].sum().backward()', 'eval', outs, {})",
    ),
    "a conjugate of an argument whose metadata is mutated with autograd off, and written": (  # it crashed the process
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = torch.view_as_complex(x.reshape(-1, 2)).conj(); b = x.contiguous(); v = x.transpose(0, -1); w = v[::2]; "
        "with torch.no_grad(): b.unsqueeze_(0); v.copy_(v); return w.contiguous(), a",
        "attempt('outs[0].zero_()', 'eval', outs, {})",
    ),
    "gradients of a view that was turned, of which another was made": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.sin(); b = a.expand(2, 3, 4); b.unsqueeze_(0); c = b.expand(2, *b.shape); return b + a, c",
        "",
    ),
    "a part of a view that autograd has made anew": (
        f"x = {_WHOLE}.requires_grad_(); y = x.t()",
        "a = y.movedim(0, -1); x.detach().add_(1); return a.chunk(2, -1)[1], (y + y).exp()",
        "attempt('x.add_(1)', 'eval', outs, {'x': x})",
    ),
    "a part of an updated view": (
        f"x = {_WHOLE}.t(); w = {_WHOLE}.requires_grad_()",
        "a = x.transpose(0, -1); b = a.exp().unsafe_split(2)[0]; a.mul_(w); return a.split(2)[0], b",
        "attempt('outs[0].exp_()', 'eval', outs, {})",
    ),
    "a part by unsafe_split and its detached twin": (
        f"x = {_WHOLE}",
        "a = (x * 2).unsafe_split(2)[0]; return a, a.detach()",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "as_strided of a view whose data an argument is, which is written": (
        f"x = {_WHOLE}.requires_grad_(); y = x.reshape(-1)[2:7]; z = y.data",
        "a = y.as_strided((2,), (1,)); z[0] = 3; return a,",
        "",
    ),
    "strides of a dimension of size 1, of what is written through a custom function's result": (
        f"x = {_WHOLE}.t()",
        "a = x.narrow(0, 0, 1); b = a.sin(); c = Same.apply(b); c.add_(a); return b,",
        "",
    ),
    "a leaf resized by out=, of which a view that nothing reads again was made before": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = {_WHOLE}.requires_grad_()",
        "a = y.clone().detach(); b = y.expand(2, *y.shape)\n"
        "    with torch.no_grad():\n        torch.sin(b, out=y)\n    c = y.narrow(0, 0, 1)\n    return a[0], a, c",
        "attempt('outs[2].transpose_(0, -1)', 'eval', outs, {'x': x, 'y': y})",
    ),
    "gradients of arguments that are views of one another": (
        f"x = {_WHOLE}.requires_grad_(); y = x.view(-1); z = y[0]",
        "return y + z, y.view(-1), x * z",
        "",
    ),
    "gradients of a non-leaf and its view": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = x[0]",
        "return (x * y).sum(), (y * y).sum()",
        "",
    ),
    "data of an argument, written": (
        f"x = {_WHOLE}; y = x[1:]",
        "a = y.data; a.exp_(); b = a.view(-1); return a, b, y.detach()",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "data of an argument, turned": (
        f"x = {_WHOLE}",
        "x[..., 0] += 1; a = x.data; a.t_(); return x.contiguous(), a",
        "",
    ),
    "a view turned after it was made of an argument": (
        f"x = {_WHOLE}",
        "a = x.view(-1); a.unsqueeze_(0); b = x[0]; return a, b",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "a base turned after its view was made": (
        f"x = {_WHOLE}",
        "a = torch.cat([x, x]); b = a.as_strided((2,), (1,)); a.as_strided_((2,), (1,)); return b,",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "a base turned that leaves with its view": (
        f"x = {_WHOLE}",
        "a = torch.cat([x, x]); b = a[0]; a.t_(); return b, a",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "what was saved is complained of in eager's order": (
        f"x = {_WHOLE}.requires_grad_(); y = x[0]",
        "return y * x, (x * y).sum(0)",
        "attempt('x.detach().zero_()', 'eval', outs, {'x': x})",
    ),
    "detached from what has a counter of its own": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = torch.stack([x, x]); torch.set_grad_enabled(False); b = a.unsafe_split(2)[0]; c = b.view_as(b); "
        "torch.set_grad_enabled(True); d = b.T; a.exp_(); return c, d.detach(), d",
        "attempt('outs[1].fill_(0.5)', 'eval', outs, {}); attempt('outs[0].neg_()', 'eval', outs, {})",
    ),
    "a complex part, changed, of what does not begin its memory": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.view_as_complex(x[1:].unsafe_split(2)[0].reshape(-1, 2)); a[..., 0] += 1; return a * 2,",
        "",
    ),
    "a part of an argument that was given a new value": (
        f"x = {_WHOLE}.cos().requires_grad_() * 1.5; y = {_WHOLE}.requires_grad_() * 1.5",
        "x.fill_(0.5); a = torch.cat([y, x]); y.zero_(); return a, y.chunk(2, -1)[1]",
        "attempt('y.sin_()', 'eval', outs, {'y': y})",
    ),
    "a part of an argument that was given a new value, and its gradient": (
        f"x = {_WHOLE}.cos().requires_grad_() * 1.5; y = {_WHOLE}.requires_grad_() * 1.5",
        "x.fill_(0.5); a = torch.cat([y, x]); y.zero_(); return a, y[1:]",
        "",
    ),
    "a backward that ends at a view made with autograd off": (
        f"x = {_WHOLE}.requires_grad_(); y = x.detach()",
        "torch.set_grad_enabled(False); a = x[::2]; torch.set_grad_enabled(True); "
        "return a.reshape(-1, 4).cos()[0] * x, y[::2]",
        "attempt('outs[1].squeeze_()', 'eval', outs, {})",
    ),
    "given other memory while a view has its counter": (
        f"x = {_WHOLE}",
        "a = x + 1; a.add_(1); b = a.view(-1); a.data = a; return b[..., :2],",
        "attempt('outs[0].neg_()', 'eval', outs, {})",
    ),
    "given memory, and detached before": (
        f"x = {_WHOLE}.requires_grad_(); y = x.detach()",
        "a = y.squeeze().view(torch.int32); a.data = y.view(torch.int32).clone(); return a, y",
        "attempt('y.detach().add_(1)', 'eval', outs, {'y': y})",
    ),
    "conjugate and other types of what a backward needs": (
        "x = torch.view_as_complex(torch.arange(24.0).reshape(3, 4, 2).sin()).requires_grad_()",
        "return x.conj() * x.real, (x.conj().imag * x).abs()",
        "",
    ),
    "a non-leaf made in inference mode": (
        f"x = {_WHOLE}",
        "\n    with torch.inference_mode():\n        a = x * 2; x.add_(1)\n    return a, x",
        "attempt('outs[0].neg_()', 'eval', outs, {})",
    ),
    "a part with a counter of its own, of what a backward needs": (
        f"x = {_WHOLE}.requires_grad_(); y = x.detach()",
        "return x.relu().unsafe_split(2)[0],",
        "attempt('y.squeeze_()', 'eval', outs, {'y': y}); attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "parts of an argument that was enlarged": (
        "x = torch.tensor(1.5)",
        "x.resize_(5, 4).fill_(1.5); a = x.unsafe_split(2)[0]; a.exp_(); x.unsqueeze_(0); return a, x",
        "",
    ),
    "a view of an argument that was enlarged": (
        "x = torch.tensor(1.5)",
        "x.resize_(5, 4).fill_(1.5); a = x[1:]; a.exp_(); return a.view(-1), x.detach()",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "begins to require gradients, and is given another shape": (
        f"x = torch.arange(4.0).cos(); y = {_WHOLE}",
        "x.requires_grad_(); x.data = y.clone(); return torch.cat([x.reshape(-1), x.reshape(-1)]),",
        "",
    ),
    "a complex view that is turned before its base is written": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = torch.view_as_complex(x.reshape(-1, 2)); a.index_fill_(0, torch.tensor([0]), 2.0); "
        "a.as_strided_((2,), (1,)); x.fill_(0.5); return a.unflatten(0, (1, -1)),",
        "",
    ),
    "the negative, in its memory, of what leaves": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x * 1; b = torch._neg_view(a); b.data.mul_(2); b.exp_(); return a,",
        "",
    ),
    "a number's view by a custom function, changed": (
        f"x = {_WHOLE}.cos().requires_grad_()",
        "torch.set_grad_enabled(False); a = x.max(); torch.set_grad_enabled(True); b = Flat.apply(a)[1:]; "
        "c = torch.stack([b, b]); a.fill_(0.5); d = b.expand(2, *b.shape); b.sin_(); return c, d, d.flatten(), b",
        "",
    ),
    "as_strided past the view it is called on": (
        f"x = {_WHOLE}.t()",
        "a = x[0]; a.as_strided_((2,), (1,)); a.neg_(); return x.sum(),",
        "",
    ),
    "as_strided of a written intermediate": (
        f"x = {_WHOLE}.t()",
        "a = x * 2; b = a[1].as_strided((2,), (1,)); a.add_(1); b.neg_(); return a, b",
        "",
    ),
    "as_strided past an argument that is part of more": (
        "x = torch.arange(24.0)[6:18].view(3, 4)",
        "b = x[1].as_strided((2,), (5,), 3); x.add_(1); b.neg_(); return b.sum(),",
        "",
    ),
    "an output argument of another size": (
        f"x = {_WHOLE}; y = torch.tensor(1.5)",
        "torch.sin(y, out=x); return x * 2,",
        "",
    ),
    "a view made before its base was turned, of a detached one": (
        f"x = {_WHOLE}",
        "a = x.clone().detach(); b = a[1:]; a.transpose_(0, -1); return x[..., :2], b",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "a view that needs autograd, of a base that is turned": (
        f"x = {_WHOLE}.requires_grad_(); y = x[0]",
        "a = torch.stack([y, y]); b = a.as_strided((2,), (1,)); a.unsqueeze_(0); return b,",
        "",
    ),
    "written under two layouts, in the middle of memory": (
        "x = torch.arange(24.0).cos()[6:18].view(3, 4); y = x.t()",
        "x.add_(x); y.exp_(); return torch.cat([y.reshape(-1), x.reshape(-1)]),",
        "",
    ),
    "views with autograd off and on": (
        f"x = {_WHOLE}.requires_grad_(); y = {_WHOLE}",
        "a = x.chunk(2, -1)[1]; torch.set_grad_enabled(False); b = a.T; torch.set_grad_enabled(True); "
        "return a, b.T, y.view_as(y), y.detach().T",
        "attempt('y.add_(x)', 'eval', outs, {'x': x, 'y': y}); attempt('outs[2] * 2', 'eval', outs, {})",
    ),
    "a view of another type, turned with autograd off": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.view_as_complex(x.reshape(-1, 2)); b = a.view_as(a); torch.set_grad_enabled(False); "
        "b.as_strided_((2,), (1,)); torch.set_grad_enabled(True); return a, b",
        "attempt('x.squeeze_()', 'eval', outs, {'x': x})",
    ),
    "given another's memory": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.data; b = a.conj(); b.set_(x); return b, a",
        "attempt('outs[1].squeeze_()', 'eval', outs, {})",
    ),
    "a non-leaf changed in place with gradients": (
        f"w = {_WHOLE}.requires_grad_(); x = {_WHOLE}.cos().requires_grad_() * 1.5",
        "x.mul_(w); return x,",
        "attempt('outs[0].sum()', 'eval', outs, {})",
    ),
    "a leaf made in the step": (
        f"x = {_WHOLE}",
        "w = torch.ones(4, requires_grad=True); return w, (w * x).sum()",
        "attempt('outs[1].backward()', 'eval', outs, {}); attempt('outs[0].grad', 'eval', outs, {})",
    ),
    "a no_grad view of a leaf, and what is made of it": (
        f"x = {_WHOLE}.requires_grad_()",
        "torch.set_grad_enabled(False); a = x[0]; torch.set_grad_enabled(True); return a.relu()[::2],",
        "",
    ),
    "autograd on inside, off outside": (
        f"x = {_WHOLE}.requires_grad_()",
        "torch.set_grad_enabled(False); x.data = x.detach() * 2; torch.set_grad_enabled(True); return x * 2, x",
        "",
    ),
    "strides of a transposed argument that is written": (
        f"x = {_WHOLE}.t()",
        "x.masked_fill_(x > 0, -1.0); x.squeeze_(); return x, x * x",
        "",
    ),
    "an argument written, then turned": (
        f"x = {_WHOLE}",
        "x.exp_(); x.transpose_(0, -1); return x, x.sum()",
        "attempt('outs[0].t_()', 'eval', outs, {})",
    ),
    "parts that are no views of one another": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.unsafe_split(2)[0]; a.squeeze_(); b = a.real; return x.T, b, b.t()",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "as_strided past the end of memory, unused": (
        "x = torch.tensor(1.5)",
        "a = x.as_strided((2,), (1,)); return x * 2,",
        "",
    ),
    "a conjugate gradient from outside": (
        f"x = {_WHOLE}.requires_grad_()",
        "return torch.complex(x, x).conj()[0],",
        "",
    ),
    "inference mode before views of an argument": (
        f"x = {_WHOLE}",
        "m = torch.inference_mode(); m.__enter__(); x.mul_(2); m.__exit__(None, None, None); return x.sum(), x[0]",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "views that leave, and nothing else that needs autograd": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x[..., :2]; b = a[::2]; return b, a, a",
        "attempt('outs[0].sum()', 'eval', outs, {})",
    ),
    "an error that names versions": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.clone(); a.exp_(); return a, x.sin()",
        "attempt('outs[0][..., 0] += 1', 'exec', outs, {})",
    ),
    "a detached view that begins to require gradients": (
        f"x = {_WHOLE}",
        "a = x.detach(); a.requires_grad_(); return a, x.contiguous()",
        "attempt('x.sin_()', 'eval', outs, {'x': x})",
    ),
    "a view that another is made of, and no backward in between": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x[..., :2]; b = a.expand(2, *a.shape); return b, b.unbind(0)[0]",
        "",
    ),
    "a complex view of the last result, and a view of it": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.view_as_complex(torch.cat([x, x]).reshape(-1, 2)); return a[1:], a",
        "attempt('outs[0].transpose_(0, -1)', 'eval', outs, {})",
    ),
    "a typed view and its base, turned": (
        "x = torch.tensor(1.5)",
        "a = x.sum(); b = a.view(torch.int32); a.squeeze_(); return a, b",
        "attempt('outs[0].squeeze_()', 'eval', outs, {})",
    ),
    "views of data that leaves too": (
        f"x = {_WHOLE}",
        "a = x.data; x.squeeze_(); b = a.unsqueeze(0); return b.detach(), a.detach(), x, a",
        "attempt('torch.sin(outs[0], out=outs[0])', 'eval', outs, {})",
    ),
    "views of data that does not leave": (
        f"x = {_WHOLE}",
        "a = x.data.unsqueeze(0); return a.detach(), a.detach()",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "a constant of the forward that the backward computes again": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = torch.cat([x, x]); a.index_fill_(0, torch.tensor([0]), 2.0); return a, a.conj() * x.sum()",
        "",
    ),
    "gradients of several uses of a tensor of which a view leaves": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.view_as(x); return a, a.expand(2, *a.shape), torch.stack([a, a])",
        "",
    ),
    "gradients of uses in several stages": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x * x.sin() * 0.3 + x; b = (a * x * x.cos()).exp(); return a, b, b * x * 0.7 * x",
        "",
    ),
    "a view of an argument that is turned afterwards": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = x",
        "x.fill_(0.5); a = x.expand(2, *x.shape); y.t_(); return a.T,",
        "",
    ),
    "gradients of views that overlap, in the order in which they were made": (
        f"x = {_WHOLE}.cos().requires_grad_()",
        "a = x.expand(2, *x.shape); b = x.chunk(2, -1)[1]; return x.unfold(0, 2, 1), a, b",
        "",
    ),
    "gradients of several things made of a view that does not leave": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.movedim(0, -1); b = a * a; c = a.narrow(0, 0, 1); d = a.movedim(0, -1).t(); return b, c.t(), c, d",
        "",
    ),
    "gradients of several results of one argument": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x + 1; b = x.reshape(-1); c = torch.cat([x.reshape(-1), x.reshape(-1)]); return b, a.split(2)[0], c",
        "",
    ),
    "a gradient to which something is added outside": (
        f"y = {_WHOLE}; x = {_WHOLE}.cos().requires_grad_()",
        "return y, torch.stack([x, x])",
        "attempt('outs[0].mul_(x)', 'eval', outs, {'x': x})",
    ),
    "an expanded view whose base is written afterwards": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x + x; b = a.expand(2, *a.shape); a.reshape(-1)[..., 0] += 1; return b, a",
        "",
    ),
    "a typed view of a part that has a counter of its own": (
        f"x = {_WHOLE}",
        "a = x.unsafe_split(2)[0]; return a.view(torch.int32), a, x",
        "attempt('outs[1].neg_()', 'eval', outs, {})",
    ),
    "an argument and a result changed before the backward": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = x[0]",
        "return x.max(),",
        "attempt('outs[0].add_(1)', 'eval', outs, {}); attempt('y.t_()', 'eval', outs, {'y': y})",
    ),
    "a view of an output that was resized": (
        f"x = torch.tensor(1.5); y = {_WHOLE}",
        "a = y.view_as(y); torch.sin(x, out=a); b = a.expand(2, *a.shape); return b,",
        "attempt('outs[0].zero_()', 'eval', outs, {})",
    ),
    "views made with autograd off of one that was turned": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = torch.view_as_complex(x.reshape(-1, 2)); a.unsqueeze_(0); torch.set_grad_enabled(False); "
        "b = a.reshape(-1); torch.set_grad_enabled(True); return b, b.view_as(b).flatten()",
        "attempt('x.relu_()', 'eval', outs, {'x': x})",
    ),
    "results that come to a view in the order in which they were begun": (
        f"x = {_WHOLE}.cos().requires_grad_()",
        "a = x.expand(2, *x.shape); b = x + x; return a.relu(), b.view(torch.int32), b",
        "",
    ),
    "a write to one copy of an expanded view": (
        f"x = {_WHOLE}",
        "a = x.expand(2, *x.shape)[1:]; a.masked_fill_(a > 0, -1.0); return x,",
        "",
    ),
    "saved, and changed through a detached twin from outside": (
        f"x = torch.arange(4.0).cos(); y = {_WHOLE}.requires_grad_() * 1.5; z = x.detach()",
        "a = y * x; z.sin_(); return a, z",
        "attempt('z.mul_(y)', 'eval', outs, {'y': y, 'z': z})",
    ),
    "saved, and turned through a view of a detached twin": (
        f"x = {_WHOLE}; y = x.detach(); z = {_WHOLE}.requires_grad_()",
        "a = x.expand(2, 3, 4); b = y.detach() * z; a.unsqueeze_(0); return b,",
        "",
    ),
    "one of several views, and a twin of another type turned": (
        f"x = {_WHOLE}.requires_grad_(); y = x.detach().view(torch.uint8)",
        "a = x.chunk(2, -1)[1]; b = y.narrow(0, 0, 1); b.t_(); return a, x.squeeze()",
        "attempt('outs[0].transpose_(0, -1)', 'eval', outs, {})",
    ),
    "a twin and then what it is a twin of": (
        f"x = {_WHOLE}; y = x.detach(); z = {_WHOLE}.requires_grad_()",
        "a = y[0]; b = x * z; a.add_(1); return b, a",
        "",
    ),
    "the data of an argument, saved": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.squeeze(); b = x.data * a; return a.view(torch.int32), b, x",
        "attempt('outs[0].transpose_(0, -1)', 'eval', outs, {})",
    ),
    "the data of a result, saved": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.zeros(3, 4) + 2; b = a.data * x; return a, b",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "the data of an argument, saved and handed out": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.data; return a, a * x",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "a view that was given other memory": (
        "x = torch.arange(12.0).reshape(3, 4).sin().t(); y = torch.tensor(1.5)",
        "x.data = y; x.mul_(2); x.mul_(y); a = x.view(-1); return x, a + x",
        "attempt('outs[0].detach().add_(1)', 'eval', outs, {})",
    ),
    "a view of a custom function with autograd off": (
        "x = torch.tensor(1.5); y = torch.arange(3.0).requires_grad_()",
        "torch.set_grad_enabled(False); a = Flat.apply(x); torch.set_grad_enabled(True); return a, a.squeeze(), y * 2",
        "attempt('outs[0].mul_(outs[2])', 'eval', outs, {})\nattempt('outs[1].mul_(outs[2].sum())', 'eval', outs, {})",
    ),
    "a view of a custom function that is changed": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.where(x > 0, x, x * 2); return Flat.apply(a),",
        "attempt('outs[0].unsqueeze_(0)', 'eval', outs, {})",
    ),
    "a written part of nothing, which grows": (
        "x = torch.arange(4.0).cos()",
        "x.unsqueeze_(0); a = x.clone(); b = a[1:]; torch.sin(a, out=b); return b[0].reshape(-1, 2), x * 2",
        "",
    ),
    "the greatest element, changed behind autograd's back": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.chunk(2, -1)[1]; b = a.relu(); c = a.max(); a.unsafe_split(2)[0].add_(c); return c, b",
        "attempt('x.mul_(outs[1])', 'eval', outs, {'x': x})",
    ),
    "a result saved, and shown as another type": (
        f"x = {_WHOLE}; y = {_WHOLE}.requires_grad_()",
        "a = x.clone(); return a * y, a.view(torch.uint8)",
        "",
    ),
    "a leaf turned with autograd off": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.chunk(2, -1)[1]; torch.set_grad_enabled(False); x.t_(); torch.set_grad_enabled(True); return x[1:],",
        "",
    ),
    "a view of a leaf that is turned then": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.view(-1); torch.set_grad_enabled(False); x.t_(); torch.set_grad_enabled(True); return a,",
        "",
    ),
    "a view made in the step is given other memory": (
        f"x = {_WHOLE}.requires_grad_(); y = {_WHOLE}.t()",
        "a = x.swapaxes(0, -1); b = a.sin(); c = a.unsqueeze(0); a.data = y.clone(); return c, b, a.expand(2, 4, 3)",
        "",
    ),
    "strides of a dimension of size 1": (
        f"x = {_WHOLE}.t()",
        "a = x.chunk(2, -1)[1] * 2; b = a.unsqueeze(0); b.masked_fill_(b > 0, -1.0); return b,",
        "",
    ),
    "strides of an unfolded part": (
        "x = torch.arange(4.0).cos()[:2]",
        "a = x.unfold(0, 2, 1); b = a * 2; b.add_(b); return b, a.swapaxes(0, -1)",
        "",
    ),
    "a gradient added up in the order of its own memory": (
        f"x = {_WHOLE}.cos().requires_grad_(); y = {_WHOLE}.t()",
        "a = x.as_strided((2,), (1,)); return (y + y).unfold(0, 2, 1) + a,",
        "",
    ),
    "parts of an argument that autograd does not take for views": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.unsafe_split(2); return a[0], a[1], a[0] * 2",
        "attempt('outs[0].add_(1)', 'eval', outs, {})\nattempt('outs[1].mul_(outs[1])', 'eval', outs, {})",
    ),
    "such parts of a non-leaf, and a view of one": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = x.unsafe_chunk(2)[0]; return a, a[0], x * 2",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "an argument resized within its memory": (
        f"x = {_WHOLE}",
        "x.resize_(2, 3); return x * 2, x.view(-1)",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "a result resized to that of another": (
        f"x = {_WHOLE}; y = torch.zeros(2, 2)",
        "a = x * 2; b = a[1:]; b.resize_as_(y); b.add_(1); return a, b",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "a view that leaves, made between two uses": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x[::2]; c = x.unsqueeze(0); b = a.T.relu(); d = torch.where(a[0] > 0, a[0], x); d.t_(); return b, c, d, b",
        "",
    ),
    "two views that leave, and uses before, between and after": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x * 1.1; b = x.t(); c = x / 3 + x * 0.7; d = x.view(-1); return a + c * x.cos() + x.exp(), b, d",
        "",
    ),
    "two results made by turns of one argument": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x * 1.1; b = x / 3; c = x.exp(); d = x.sin(); return a + c, b * d",
        "",
    ),
    "results, and a view, made by turns of a result": (
        f"x = {_WHOLE}.requires_grad_()",
        "y = x * 0.9; a = y * 1.1; b = y / 3; v = y[0]; c = y.exp(); d = y.sin(); return y, a + c, b * d, v",
        "",
    ),
    "an argument that is updated after a view and two results were made of it": (
        f"w = {_WHOLE}.requires_grad_(); x = {_WHOLE}.cos().requires_grad_() * 1.5",
        "a = x * 1.1; b = x / 3; c = x * w; d = x * 0.7; x.mul_(w); return a + c, b * d, x",
        "",
    ),
    "a view turned before what the backward needs was written": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = x.sin(); b = a.narrow(0, 0, 1); b.squeeze_(); c = b[0]; b.exp_(); return a, b, c",
        "attempt('outs[2].squeeze()', 'eval', outs, {})",
    ),
    "a sum of what was written through a turned view": (
        f"x = {_WHOLE}.cos()",
        "a = x.clone(); b = a.t(); b.masked_fill_(b > 0, -1.0); return a.sum(), a",
        "",
    ),
    "running sums through a turned view": (
        f"x = {_WHOLE}.cos()",
        "a = x.clone(); b = a.t(); b.cumsum_(0); c = x.clone(); c.t().tril_(); return a.sum(), a.exp().sum(), c.sum()",
        "",
    ),
    "a negative view, turned and written": (
        f"x = {_WHOLE}",
        "a = torch._neg_view(x); a.resize_(2, 2); a.fill_(1.5); return x * 2, a",
        "",
    ),
    "a conjugate view, turned and written": (
        "x = torch.view_as_complex(torch.arange(12.0).sin().reshape(6, 2))",
        "a = x.conj(); a.as_strided_((2, 2), (2, 1)); a.mul_(2); return x * 2, a",
        "",
    ),
    "the greatest of nothing, which nothing uses": (
        f"x = {_WHOLE}; y = x[:0]",
        "y.max(); return x * 2, y",
        "",
    ),
    "floats for integers": (
        f"x = {_WHOLE}",
        "a = (x * 10).to(torch.int32); a.mul_(x); return x * 2,",
        "",
    ),
    "a part of several whose base was written, handed over a break": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = x.split(2)[0]; torch._foreach_add_([x, x[:2]], 1); return a,",
        "",
    ),
    "views of one part, one made by way of another": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "x.exp_(); a = x.unsafe_split(2)[0]; b = a.as_strided((2,), (1,)); c = a.flatten(); return c, b[..., :2], a",
        "",
    ),
    "a base that begins to require gradients after it was viewed": (
        "x = torch.tensor(1.5)",
        "a = torch.zeros(3, 4); b = a.split(2)[0]; a.requires_grad_(); return x, b",
        "attempt('outs[1].lerp_(outs[0], 0.5)', 'eval', outs, {})",
    ),
    "a value that two parts of the backward use": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.where(x > 0, x, x); b = a * 2; b[..., 0] += 1; c = x.chunk(2, -1)[1]; b.mul_(x); "
        "torch._foreach_add_([a], [b]); return b, a, c",
        "",
    ),
    "gates of which one result is made past the other": (
        f"x = {_WHOLE}.requires_grad_(); w = torch.linspace(-1, 1, 32).reshape(4, 8).sin().requires_grad_()",
        "i, o = (x @ w).chunk(2, 1); c = i.sigmoid() * x; h = o.sigmoid() * c.tanh(); return h, c",
        "",
    ),
    "lists of tensors, written": (
        f"x = {_WHOLE}; y = {_WHOLE}.cos()",
        "a = x.t(); torch._foreach_mul_([a, y], 2); torch._foreach_add_([y], [x]); return a, y.view(-1)",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "lists of tensors that share memory, written": (
        f"x = {_WHOLE}; y = x[1:]",
        "torch._foreach_add_([x, y], 1); torch._foreach_mul_([y, x], [x[:2], x]); return x * 2, y",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "a view of a part that the step made a leaf": (
        f"x = {_WHOLE}",
        "a = x.unsafe_split(2)[0]; a.requires_grad_(); b = a.t(); c = b.relu(); return b, c, c[0]",
        "",
    ),
    "a list that holds a view of a non-leaf twice, written": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = x.view_as(x); torch._foreach_add_([a, a], 1); return a,",
        "",
    ),
    "a list of tensors that the backward needs, written": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.relu(); b = a.exp(); torch._foreach_add_([b], [a]); return a, b",
        "",
    ),
    "a view written with autograd off, as a list": (
        f"x = {_WHOLE}.requires_grad_()",
        "torch.set_grad_enabled(False); a = x.reshape(-1); torch._foreach_add_([x], 1); torch.set_grad_enabled(True); "
        "return a, x * 2",
        "attempt('outs[0].flatten()', 'eval', outs, {})",
    ),
    "a view of one element, written with another": (
        "x = torch.arange(2.0).reshape(1, 2)",
        "a = x[:, 1:]; b = a.view_as(a); b.neg_(); b.copy_(a); return b,",
        "",
    ),
    "a view of one element that leaves": (
        "x = torch.arange(2.0).reshape(1, 2)",
        "a = x[:, 1:]; b = a.view_as(a); return b, b * 2, b.view(1, 1)",
        "",
    ),
    "the greatest of complex numbers, which nothing uses": (
        f"x = {_WHOLE}",
        "a = torch.view_as_complex(x.reshape(-1, 2)); a.conj().max(); return x * 2,",
        "",
    ),
    "a no_grad view handed on, its base written under another type": (
        f"x = {_WHOLE}.requires_grad_(); y = x.view(torch.int32)",
        "torch.set_grad_enabled(False); a = x.narrow(0, 0, 1); torch.set_grad_enabled(True); "
        "y.masked_fill_(y > 0, -1.0); return x * 2, a",
        "",
    ),
    "a view of what was turned before and after, beside another that leaves": (
        f"x = {_WHOLE}",
        "a = torch.where(x > 0, x, x); a.transpose_(0, -1); b = a.diagonal().clone().detach(); c = a.swapaxes(0, -1); "
        "a.transpose_(0, -1); d = x.unsafe_split(2)[0]; return d, c, b",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "a negative view that was written through a part": (
        f"x = {_WHOLE}",
        "a = torch._neg_view(torch.stack([x, x])); a[0] = 3; return a,",
        "attempt('outs[0].unsafe_split(2)[0]', 'eval', outs, {})",
    ),
    "what no kernel knows, and nothing reads": (
        f"x = {_WHOLE}",
        "a = x[::2]; b = torch.view_as_complex(a.reshape(-1, 2)); a.zero_(); b.relu(); return a, b",
        "",
    ),
}


UNDER_INDUCTOR = (
    "gradients of arguments that are views of one another",
    "data of an argument, written",
    "data of an argument, turned",
    "a view turned after it was made of an argument",
    "a base turned after its view was made",
    "written under two layouts, in the middle of memory",
    "views with autograd off and on",
    "a non-leaf changed in place with gradients",
    "an argument resized within its memory",
    "a result resized to that of another",
    "parts of an argument that autograd does not take for views",
    "such parts of a non-leaf, and a view of one",
    "a view that leaves, made between two uses",
    "two views that leave, and uses before, between and after",
    "a view turned before what the backward needs was written",
    "a negative view, turned and written",
    "views of one part, one made by way of another",
    "gates of which one result is made past the other",
    "lists of tensors, written",
    "lists of tensors that share memory, written",
)
"""One program of each kind: mutations of data and layout, several views of one tensor, and their later uses."""


def source_of(program: tuple[str, str, str]) -> str:
    """Returns the source of a program in the fuzzer's form: its arguments, its step, and the statements afterwards."""
    arguments, step, after = program
    names = ", ".join(part.split("=")[0].strip() for part in arguments.split("; "))
    lines = [
        "import torch",
        "from tests.fuzz.alias_run import Flat, Same, attempt",
        "def build():",
        *(f"    {part}" for part in arguments.split("; ")),
        f"    return {names},",
        f"def step({names}):",
        *(f"    {part}" for part in step.split("; ")),
        f"def after(outs, {names}):",
        *(textwrap.indent(after, "    ").splitlines()),
        "    return outs",
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, backend):
    check(source_of(PROGRAMS[name]), backend)


def test_an_empty_view_is_where_it_is_whatever_was_captured_before():
    """Torch's cache of fake tensors loses the base of an empty view."""

    def step(x):
        return x.view(0), x.view(0).view_as(x), x * 2

    for _ in range(3):
        call = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
        given = torch.tensor(1.5).reshape(-1)[2:7]
        want, have = step(given), call(given)
        places = [(out.storage_offset(), out.stride(), out._base is given._base) for out in want]
        assert places == [(out.storage_offset(), out.stride(), out._base is given._base) for out in have]


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("name", UNDER_INDUCTOR)
def test_program_under_inductor(name):
    """Metadata equals eager's there too; values and gradients are close."""
    assert check(source_of(PROGRAMS[name]), "inductor", close=True).replays == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("read", [False, True])
def test_a_view_that_eager_refuses_raises(backend, read):
    """Fake tensors accept some views of expanded memory that eager refuses; unused results are in no graph."""

    def step(x):
        flat = x.T.unsqueeze(0).expand(2, 1, 4).view(-1)
        return flat * 2 if read else x

    def said(run):
        with pytest.raises(RuntimeError, match="view size is not compatible") as caught:
            run(torch.ones(4, 1))
        return str(caught.value)

    compiled = sidefx_train.compile(step, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert said(compiled) == said(step) == said(compiled)


def test_a_gradient_keeps_the_strides_that_a_tangent_of_another_layout_gives_it():
    """``empty_like`` of a fake tensor chooses other strides for dimensions of size 1 than its kernel."""

    def step(x):
        out = x.t()
        tangent = torch.empty_like(out.detach())
        return torch.autograd.grad(out, x, tangent.copy_(torch.ones(2, 1)))[0]

    x = torch.ones(1, 2, requires_grad=True)
    captured = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    assert [captured(x).stride() for _ in range(3)] == [step(x).stride()] * 3
