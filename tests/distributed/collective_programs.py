"""Steps that communicate: functions of one tensor that differs between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def captured_programs() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Returns programs that are captured as one graph, by name."""
    world = dist.get_world_size()
    group = dist.new_group([0, 1])
    total = torch.zeros(4)
    weight = torch.linspace(-1, 1, 4)

    def all_reduce(x):
        y = x * 2
        dist.all_reduce(y)
        total.add_(y)
        return y + 1, y._version

    def the_same_twice(x):
        a, b = x * 3, x * 3
        dist.all_reduce(a)
        dist.all_reduce(b)
        return a + b

    def reduces_a_copy(x):
        y = x[:1].sin()
        z = y.clone().squeeze()
        dist.barrier()
        dist.all_reduce(z)
        return y * 3, z

    def result_unused(x):
        y = x * 2
        dist.all_reduce(y.clone())
        return y

    def reductions(x):
        found = []
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            y = x + 1
            dist.all_reduce(y, op=op)
            found.append(y)
        z = (x * 3).to(torch.int64)
        dist.all_reduce(z, dist.ReduceOp.BOR, group=group)
        return *found, z

    def all_gather(x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x * 2)
        return parts[0] * parts[1], torch.stack(parts)

    def all_gather_single(x):
        out = torch.empty(world * 4)
        dist.all_gather_into_tensor(out, x + 1)
        return out

    def reduce_scatter(x):
        out = torch.empty(2)
        dist.reduce_scatter_tensor(out, x * 5)
        return out

    def broadcast(x):
        y, z = x * 7, x * 9
        dist.broadcast(y, src=1)
        dist.broadcast(z, group_src=0, group=group)
        return y, z

    def all_to_all(x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x * 2)
        return out

    def uneven_all_to_all(x):
        first = dist.get_rank() == 0
        out = torch.empty(2 if first else 6)
        dist.all_to_all_single(out, x * 2, [1, 1] if first else [3, 3], [1, 3])
        return out

    def asynchronous(x):
        a, b = x * 2, x * 3
        first, second = dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)
        c = x.sin()
        assert second.wait()
        first.wait()
        return a + b + c

    def barriers(x):
        y = x * 2
        dist.barrier()
        dist.all_reduce(y)
        dist.barrier(group)
        return y * 3

    def queries(x):
        size, rank = dist.get_world_size(), dist.get_rank()
        return x * rank + size + int(dist.is_initialized()) + dist.get_rank(group) + group.size()

    def functional_collectives(x):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        z = functional.reduce_scatter_tensor(x * 2, "sum", 0, group)
        return y * 1, functional.all_gather_tensor(x, 0, group) * 1, z * 1, functional.broadcast(x + 1, 0, group) * 1

    def known_value(x):
        t = torch.tensor(3.0)
        dist.all_reduce(t)
        return x * t

    def gradients(x):
        p = weight.clone().requires_grad_()
        (p * x).sin().sum().backward()
        dist.all_reduce(p.grad)
        p.grad /= world
        return p.grad

    def in_a_hook(x):
        p = weight.clone().requires_grad_()
        p.register_hook(lambda grad: (dist.all_reduce(grad), grad)[1])
        (p * x).sin().sum().backward()
        return p.grad

    return {name: value for name, value in locals().items() if callable(value) and name not in ("group",)}


def divided_programs() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Returns programs with communication that is not captured, by name."""
    world = dist.get_world_size()
    group = dist.new_group([0, 1])
    works: list[Any] = []

    def asynchronous_barrier(x):
        y = x + 1
        dist.barrier(async_op=True).wait()
        return y * 2

    def objects(x):
        found = [None] * world
        dist.all_gather_object(found, dist.get_rank())
        return x * sum(found)

    def coalesced(x):
        y = x * 2
        with dist.distributed_c10d._coalescing_manager(async_ops=False):
            dist.all_reduce(y)
        return y

    def asynchronous_of_complex(x):
        a = torch.complex(x, x * 2)
        dist.all_reduce(a, async_op=True).wait()
        return a.real * 2

    def work_escapes(x):
        a = x * 2
        works.append(dist.all_reduce(a, async_op=True))
        works[-1].wait()
        return a + len(works)

    def work_is_asked(x):
        a = x * 2
        work = dist.all_reduce(a, async_op=True)
        work.wait()
        return a + int(work.is_completed()) + int(hasattr(work, "nothing"))

    def never_waited(x):
        works.append(dist.all_reduce(x * 2, async_op=True))
        return x + 1

    def by_the_group(x):
        a = x * 2
        group.allreduce([a]).wait()
        return a * 2

    return {name: value for name, value in locals().items() if callable(value) and name not in ("group",)}


def raising_programs() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Returns programs with collectives that raise, by name."""
    group = dist.group.WORLD

    def averages_integers(x):
        y = x.long()
        dist.all_reduce(y, dist.ReduceOp.AVG)

    def bits_of_floats(x):
        out = torch.empty(2)
        dist.reduce_scatter_tensor(out, x * 2, dist.ReduceOp.BAND)

    def functional_bits_of_floats(x):
        return functional.all_reduce(x * 2, "bor", group) + 1

    def unknown_reduction(x):
        return functional.all_reduce(x * 2, "most", group) + 1

    def wrong_splits(x):
        return functional.all_to_all_single(x * 2, [1, 1], [1, 1], group) + 1

    return {name: value for name, value in locals().items() if callable(value) and name != "group"}
