"""Programs over views: leaves, gradients, grad mode, and what a backward has saved.

A program is its arguments, its step, and the statements that run afterwards.
"""

from __future__ import annotations

_WHOLE = "torch.arange(12.0).reshape(3, 4).sin()"

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
    "gradients of a view that was unsqueezed, and of a view of it": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.sin(); b = a.expand(2, 3, 4); b.unsqueeze_(0); c = b.expand(2, *b.shape); return b + a, c",
        "",
    ),
    "a part of a view whose history autograd regenerated": (
        f"x = {_WHOLE}.requires_grad_(); y = x.t()",
        "a = y.movedim(0, -1); x.detach().add_(1); return a.chunk(2, -1)[1], (y + y).exp()",
        "attempt('x.add_(1)', 'eval', outs, {'x': x})",
    ),
    "a part by unsafe_split and its detached alias": (
        f"x = {_WHOLE}",
        "a = (x * 2).unsafe_split(2)[0]; return a, a.detach()",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
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
    "what was saved is complained of in eager's order": (
        f"x = {_WHOLE}.requires_grad_(); y = x[0]",
        "return y * x, (x * y).sum(0)",
        "attempt('x.detach().zero_()', 'eval', outs, {'x': x})",
    ),
    "a part of an argument that was overwritten, and its gradient": (
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
    "begins to require gradients, then its storage and shape are replaced": (
        f"x = torch.arange(4.0).cos(); y = {_WHOLE}",
        "x.requires_grad_(); x.data = y.clone(); return torch.cat([x.reshape(-1), x.reshape(-1)]),",
        "",
    ),
    "a view that needs autograd, of a base that is unsqueezed": (
        f"x = {_WHOLE}.requires_grad_(); y = x[0]",
        "a = torch.stack([y, y]); b = a.as_strided((2,), (1,)); a.unsqueeze_(0); return b,",
        "",
    ),
    "views with autograd off and on": (
        f"x = {_WHOLE}.requires_grad_(); y = {_WHOLE}",
        "a = x.chunk(2, -1)[1]; torch.set_grad_enabled(False); b = a.T; torch.set_grad_enabled(True); "
        "return a, b.T, y.view_as(y), y.detach().T",
        "attempt('y.add_(x)', 'eval', outs, {'x': x, 'y': y}); attempt('outs[2] * 2', 'eval', outs, {})",
    ),
    "a view of another type, restrided with autograd off": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.view_as_complex(x.reshape(-1, 2)); b = a.view_as(a); torch.set_grad_enabled(False); "
        "b.as_strided_((2,), (1,)); torch.set_grad_enabled(True); return a, b",
        "attempt('x.squeeze_()', 'eval', outs, {'x': x})",
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
    "an argument and a result changed before the backward": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = x[0]",
        "return x.max(),",
        "attempt('outs[0].add_(1)', 'eval', outs, {}); attempt('y.t_()', 'eval', outs, {'y': y})",
    ),
    "views made with autograd off of one that was unsqueezed": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = torch.view_as_complex(x.reshape(-1, 2)); a.unsqueeze_(0); torch.set_grad_enabled(False); "
        "b = a.reshape(-1); torch.set_grad_enabled(True); return b, b.view_as(b).flatten()",
        "attempt('x.relu_()', 'eval', outs, {'x': x})",
    ),
    "saved, and changed through a detached alias from outside": (
        f"x = torch.arange(4.0).cos(); y = {_WHOLE}.requires_grad_() * 1.5; z = x.detach()",
        "a = y * x; z.sin_(); return a, z",
        "attempt('z.mul_(y)', 'eval', outs, {'y': y, 'z': z})",
    ),
    "saved, and unsqueezed through a view of a detached alias": (
        f"x = {_WHOLE}; y = x.detach(); z = {_WHOLE}.requires_grad_()",
        "a = x.expand(2, 3, 4); b = y.detach() * z; a.unsqueeze_(0); return b,",
        "",
    ),
    "one of several views, and an alias of another type transposed": (
        f"x = {_WHOLE}.requires_grad_(); y = x.detach().view(torch.uint8)",
        "a = x.chunk(2, -1)[1]; b = y.narrow(0, 0, 1); b.t_(); return a, x.squeeze()",
        "attempt('outs[0].transpose_(0, -1)', 'eval', outs, {})",
    ),
    "a detached alias, then the tensor itself": (
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
    "a view of a custom function with autograd off": (
        "x = torch.tensor(1.5); y = torch.arange(3.0).requires_grad_()",
        "torch.set_grad_enabled(False); a = Flat.apply(x); torch.set_grad_enabled(True); return a, a.squeeze(), y * 2",
        "attempt('outs[0].mul_(outs[2])', 'eval', outs, {})\nattempt('outs[1].mul_(outs[2].sum())', 'eval', outs, {})",
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
    "a leaf transposed with autograd off": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.chunk(2, -1)[1]; torch.set_grad_enabled(False); x.t_(); torch.set_grad_enabled(True); return x[1:],",
        "",
    ),
    "a view of a leaf that is transposed afterwards": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.view(-1); torch.set_grad_enabled(False); x.t_(); torch.set_grad_enabled(True); return a,",
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
    "a view squeezed before what the backward needs was written": (
        f"x = {_WHOLE}.requires_grad_() * 1.5",
        "a = x.sin(); b = a.narrow(0, 0, 1); b.squeeze_(); c = b[0]; b.exp_(); return a, b, c",
        "attempt('outs[2].squeeze()', 'eval', outs, {})",
    ),
    "running sums through a transposed view": (
        f"x = {_WHOLE}.cos()",
        "a = x.clone(); b = a.t(); b.cumsum_(0); c = x.clone(); c.t().tril_(); return a.sum(), a.exp().sum(), c.sum()",
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
    "a no_grad view handed on, its base written under another type": (
        f"x = {_WHOLE}.requires_grad_(); y = x.view(torch.int32)",
        "torch.set_grad_enabled(False); a = x.narrow(0, 0, 1); torch.set_grad_enabled(True); "
        "y.masked_fill_(y > 0, -1.0); return x * 2, a",
        "",
    ),
}
