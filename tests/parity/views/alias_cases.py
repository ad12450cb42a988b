"""Programs over views: layouts, sizes and storages that change, and views that leave the step.

A program is its arguments, its step, and the statements that run afterwards.
"""

from __future__ import annotations

_WHOLE = "torch.arange(12.0).reshape(3, 4).sin()"

PROGRAMS = {
    "a part of an updated view": (
        f"x = {_WHOLE}.t(); w = {_WHOLE}.requires_grad_()",
        "a = x.transpose(0, -1); b = a.exp().unsafe_split(2)[0]; a.mul_(w); return a.split(2)[0], b",
        "attempt('outs[0].exp_()', 'eval', outs, {})",
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
    "data of an argument, written": (
        f"x = {_WHOLE}; y = x[1:]",
        "a = y.data; a.exp_(); b = a.view(-1); return a, b, y.detach()",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "data of an argument, transposed": (
        f"x = {_WHOLE}",
        "x[..., 0] += 1; a = x.data; a.t_(); return x.contiguous(), a",
        "",
    ),
    "metadata of a view of an argument mutated": (
        f"x = {_WHOLE}",
        "a = x.view(-1); a.unsqueeze_(0); b = x[0]; return a, b",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "the metadata of a base mutated after its view was made": (
        f"x = {_WHOLE}",
        "a = torch.cat([x, x]); b = a.as_strided((2,), (1,)); a.as_strided_((2,), (1,)); return b,",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "a base with mutated metadata that leaves with its view": (
        f"x = {_WHOLE}",
        "a = torch.cat([x, x]); b = a[0]; a.t_(); return b, a",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
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
    "a part of an argument that was overwritten": (
        f"x = {_WHOLE}.cos().requires_grad_() * 1.5; y = {_WHOLE}.requires_grad_() * 1.5",
        "x.fill_(0.5); a = torch.cat([y, x]); y.zero_(); return a, y.chunk(2, -1)[1]",
        "attempt('y.sin_()', 'eval', outs, {'y': y})",
    ),
    "storage replaced while a view shares its version counter": (
        f"x = {_WHOLE}",
        "a = x + 1; a.add_(1); b = a.view(-1); a.data = a; return b[..., :2],",
        "attempt('outs[0].neg_()', 'eval', outs, {})",
    ),
    "storage replaced, and detached before": (
        f"x = {_WHOLE}.requires_grad_(); y = x.detach()",
        "a = y.squeeze().view(torch.int32); a.data = y.view(torch.int32).clone(); return a, y",
        "attempt('y.detach().add_(1)', 'eval', outs, {'y': y})",
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
    "metadata of a complex view mutated before its base is written": (
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
    "a view made before its detached base was transposed": (
        f"x = {_WHOLE}",
        "a = x.clone().detach(); b = a[1:]; a.transpose_(0, -1); return x[..., :2], b",
        "attempt('outs[1].add_(1)', 'eval', outs, {})",
    ),
    "written under two layouts, in the middle of memory": (
        "x = torch.arange(24.0).cos()[6:18].view(3, 4); y = x.t()",
        "x.add_(x); y.exp_(); return torch.cat([y.reshape(-1), x.reshape(-1)]),",
        "",
    ),
    "storage of another taken by set_": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.data; b = a.conj(); b.set_(x); return b, a",
        "attempt('outs[1].squeeze_()', 'eval', outs, {})",
    ),
    "strides of a transposed argument that is written": (
        f"x = {_WHOLE}.t()",
        "x.masked_fill_(x > 0, -1.0); x.squeeze_(); return x, x * x",
        "",
    ),
    "an argument written, then transposed": (
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
    "an error that names versions": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x.clone(); a.exp_(); return a, x.sin()",
        "attempt('outs[0][..., 0] += 1', 'exec', outs, {})",
    ),
    "a complex view of the last result, and a view of it": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.view_as_complex(torch.cat([x, x]).reshape(-1, 2)); return a[1:], a",
        "attempt('outs[0].transpose_(0, -1)', 'eval', outs, {})",
    ),
    "a typed view and its base, squeezed in place": (
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
    "a view of an argument that is transposed afterwards": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = x",
        "x.fill_(0.5); a = x.expand(2, *x.shape); y.t_(); return a.T,",
        "",
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
    "a view of an output that was resized": (
        f"x = torch.tensor(1.5); y = {_WHOLE}",
        "a = y.view_as(y); torch.sin(x, out=a); b = a.expand(2, *a.shape); return b,",
        "attempt('outs[0].zero_()', 'eval', outs, {})",
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
    "a view whose storage was replaced": (
        "x = torch.arange(12.0).reshape(3, 4).sin().t(); y = torch.tensor(1.5)",
        "x.data = y; x.mul_(2); x.mul_(y); a = x.view(-1); return x, a + x",
        "attempt('outs[0].detach().add_(1)', 'eval', outs, {})",
    ),
    "a view of a custom function that is changed": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = torch.where(x > 0, x, x * 2); return Flat.apply(a),",
        "attempt('outs[0].unsqueeze_(0)', 'eval', outs, {})",
    ),
    "a written empty part, resized by out=": (
        "x = torch.arange(4.0).cos()",
        "x.unsqueeze_(0); a = x.clone(); b = a[1:]; torch.sin(a, out=b); return b[0].reshape(-1, 2), x * 2",
        "",
    ),
    "the storage of a view made in the step is replaced": (
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
    "two results of one argument, computed alternately": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = x * 1.1; b = x / 3; c = x.exp(); d = x.sin(); return a + c, b * d",
        "",
    ),
    "results and a view of a result, computed alternately": (
        f"x = {_WHOLE}.requires_grad_()",
        "y = x * 0.9; a = y * 1.1; b = y / 3; v = y[0]; c = y.exp(); d = y.sin(); return y, a + c, b * d, v",
        "",
    ),
    "an argument that is updated after a view and two results were made of it": (
        f"w = {_WHOLE}.requires_grad_(); x = {_WHOLE}.cos().requires_grad_() * 1.5",
        "a = x * 1.1; b = x / 3; c = x * w; d = x * 0.7; x.mul_(w); return a + c, b * d, x",
        "",
    ),
    "a sum of what was written through a transposed view": (
        f"x = {_WHOLE}.cos()",
        "a = x.clone(); b = a.t(); b.masked_fill_(b > 0, -1.0); return a.sum(), a",
        "",
    ),
    "a negative view, resized and written": (
        f"x = {_WHOLE}",
        "a = torch._neg_view(x); a.resize_(2, 2); a.fill_(1.5); return x * 2, a",
        "",
    ),
    "a conjugate view, restrided and written": (
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
    "a view of what was transposed before and after, with another that leaves": (
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
