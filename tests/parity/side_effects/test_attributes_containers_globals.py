"""Python side effects of a step, reproduced exactly: attributes, containers, cells, globals, prints, hooks."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity

TOTAL = 0
SEEN: list[object] = []


class Plain:
    """An instance of a user class."""


def program(body, *, data=None, state=None, **fields) -> Program:
    """A trainer object with ``fields``, whose step is ``body(self, loss, x)`` between backward and update."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Plain()
    vars(trainer).update(fields)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        result = body(trainer, loss, x)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() if result is None else result

    return Program(step, data or batches((5, 6), classes=3), (model, optimizer, trainer, state))


def check(body, *, fields=dict, steps=10, captures=1, backend="eager", state=None):
    return parity(
        lambda: program(body, state=state() if state else None, **fields()),
        steps=steps,
        captures=captures,
        backend=backend,
    )


def test_counter():
    def body(self, loss, x):
        self.calls += 1

    check(body, fields=lambda: {"calls": 0})


@pytest.mark.parametrize("start", [0, 255, 2**40, True, -1])
def test_counter_from_any_start(start):
    def body(self, loss, x):
        self.calls += 1

    check(body, fields=lambda: {"calls": start}, captures=2 if start is True else 1)


def test_counter_never_recaptures():
    """The first call compiles once; calls 2 to 1000 replay."""
    model = nn.Linear(3, 1)
    trainer = Plain()
    trainer.calls, trainer.stats, trainer.history = 0, {"n": 0}, []

    def step(x):
        trainer.calls += 1
        trainer.stats["n"] = trainer.stats["n"] + trainer.calls
        trainer.history.append(trainer.calls)
        return model(x).detach()

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    x = torch.ones(2, 3)
    for _ in range(1000):
        compiled(x)
    report = compiled.report()
    assert (trainer.calls, trainer.stats["n"]) == (1000, 500500), f"{trainer.calls}, {trainer.stats}"
    assert trainer.history == list(range(1, 1001)), "history is not eager's"
    assert (len(report.captures), report.calls, report.fallback_count) == (1, 1000, 0), str(report)
    assert not report.recaptures, str(report)


def test_float_accumulator():
    def body(self, loss, x):
        self.ema = 0.9 * self.ema + 0.1 * self.calls
        self.calls += 1

    check(body, fields=lambda: {"ema": 1.0, "calls": 0})


def test_history_of_losses():
    def body(self, loss, x):
        self.history.append(loss.detach())

    check(body, fields=lambda: {"history": []})


def test_history_survives_later_steps():
    """A loss kept from step k is still right at step k + 10 (its memory is not reused)."""

    def body(self, loss, x):
        self.history.append(loss.detach())
        self.weights.append([p.detach().clone() for p in self.watch[0].parameters()])

    def make() -> Program:
        made = program(body, history=[], weights=[])
        made.watch[2].watch = made.watch[:1]
        return made

    parity(make, steps=12)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_dict_entry(backend):
    def body(self, loss, x):
        self.stats["n"] = self.stats.get("n", 0) + 1
        self.stats["last"] = loss.detach()

    # Only at the first call, the entries are missing.
    check(body, fields=lambda: {"stats": {}}, captures=2, backend=backend)


def test_dict_entry_present():
    def body(self, loss, x):
        self.stats["n"] = self.stats["n"] + x.shape[0]

    check(body, fields=lambda: {"stats": {"n": 0}})


def test_nested_containers():
    def body(self, loss, x):
        self.tree["a"]["b"][0].append((loss.detach(), {"rows": x.shape[0]}))
        self.tree["a"]["c"] = self.tree["a"]["b"]
        self.tree["order"] = [self.tree["order"][-1] + 1]

    check(body, fields=lambda: {"tree": {"a": {"b": [[]]}, "order": [0]}}, captures=2)


def test_shared_containers_stay_shared():
    def body(self, loss, x):
        self.one.append(loss.detach())
        self.again = self.one
        self.pair = [self.one, self.one]

    check(body, fields=lambda: {"one": [], "again": None, "pair": None}, captures=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda s, v: s.append(v),
        lambda s, v: s.extend([v, v]),
        lambda s, v: s.insert(0, v),
        lambda s, v: s.__setitem__(slice(0, 1), [v]),
        lambda s, v: (s.append(v), s.pop(0)),
        lambda s, v: (s.clear(), s.append(v)),
        lambda s, v: s.reverse(),
        lambda s, v: s.__iadd__([v]),
        lambda s, v: s.__delitem__(0) if len(s) > 3 else s.append(v),
        lambda s, v: s.sort(reverse=True),
    ],
    ids=["append", "extend", "insert", "slice", "rotate", "clear", "reverse", "iadd", "delete", "sort"],
)
def test_list_methods(change):
    def body(self, loss, x):
        change(self.items, self.n)
        self.n += 1

    check(body, fields=lambda: {"items": [5, 3, 4], "n": 10}, captures=None, steps=5)


def test_set_deque_and_ordered_dicts():
    def body(self, loss, x):
        self.names.add(self.n % 3)
        self.recent.append(loss.detach())
        self.ordered.move_to_end("a")
        self.ordered["n"] = self.n
        self.counts["rows"] += x.shape[0]
        self.counter.update(["seen"])
        self.n += 1

    def fields():
        return {
            "names": set(),
            "recent": collections.deque(maxlen=3),
            "ordered": collections.OrderedDict(a=1, n=0),
            "counts": collections.defaultdict(int),
            "counter": collections.Counter(),
            "n": 0,
        }

    check(body, fields=fields, captures=None)


def test_closure_cell():
    def make() -> Program:
        calls, best = 0, None
        model = mlp()

        def step(x, y):
            nonlocal calls, best
            calls += 1
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            best = loss.detach()
            return best, calls

        def peek():
            return calls, best

        made = Program(step, batches((5, 6), classes=3), (model,))
        made.between = lambda: made.__setattr__("watch", (model, peek()))  # type: ignore[attr-defined]
        return made

    parity(make, captures=2, between=lambda made, index: made.between())


def test_two_functions_share_a_cell():
    def make() -> Program:
        count = 0
        model = mlp()

        def bump():
            nonlocal count
            count += 1

        def step(x, y):
            bump()
            before = count
            bump()
            return model(x).detach().sum() * before, count

        return Program(step, batches((5, 6), classes=3), (model,))

    parity(make)


def test_module_global():
    def make() -> Program:
        global TOTAL
        TOTAL = 0
        SEEN.clear()
        model = mlp()

        def step(x, y):
            global TOTAL
            TOTAL += x.shape[0]
            SEEN.append(model(x).detach().mean())
            return TOTAL

        return Program(step, batches((5, 6), classes=3), (model, SEEN))

    parity(make)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_print_in_order(backend):
    def body(self, loss, x):
        print("call", self.calls)
        self.calls += 1
        print("rows", x.shape[0], sep="=", end=";\n")
        print(f"still {self.calls}")

    check(body, fields=lambda: {"calls": 0}, backend=backend)


def test_print_of_tensors():
    def body(self, loss, x):
        print("loss", loss.detach())
        print(x.sum())

    check(body)


def test_list_argument():
    def make() -> Program:
        model = mlp()
        data = batches((5, 6), classes=3)

        def step(x, y, out, options):
            loss = F.cross_entropy(model(x), y)
            out.append(loss.detach())
            out[0] = "seen"
            options["rows"] = x.shape[0]
            del options["drop"]
            return loss.detach()

        return Program(step, lambda i: (*data(i), [None], {"drop": 1}), (model,))

    parity(make)


def test_deleted_attribute():
    def body(self, loss, x):
        self.again = self.temporary + 1
        del self.temporary
        self.kept = 1
        del self.kept

    def make() -> Program:
        return program(body, temporary=1)

    parity(make, between=lambda made, index: setattr(made.watch[2], "temporary", 2), captures=3)


def test_new_attribute():
    def body(self, loss, x):
        if not hasattr(self, "first"):
            self.first = loss.detach()
        self.last = loss.detach()

    check(body, captures=3)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_attribute_holding_a_tensor(backend):
    """An exponential average updated out of place, and one updated in place."""

    def body(self, loss, x):
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.inplace.mul_(0.9).add_(loss.detach())

    check(body, fields=lambda: {"average": torch.zeros(()), "inplace": torch.zeros(())}, backend=backend)


def test_attribute_tensor_alias():
    def body(self, loss, x):
        self.view = self.base[1:]
        self.view.add_(loss.detach())
        self.same = self.base

    check(body, fields=lambda: {"base": torch.zeros(3), "view": None, "same": None}, captures=2)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_tensor_hook_on_an_intermediate(backend):
    """The hook appends the gradient's norm to a list and halves the gradient; a counter is read next step."""

    def make() -> Program:
        first, second = nn.Linear(6, 8), nn.Linear(8, 3)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        norms: list[torch.Tensor] = []
        state = {"calls": 0}

        def step(x, y):
            hidden = torch.relu(first(x))

            def halve(grad):
                norms.append(grad.norm())
                state["calls"] += 1
                return grad * 0.5

            hidden.register_hook(halve)
            loss = F.cross_entropy(second(hidden) * (1 + state["calls"]), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (first, second, optimizer, norms, state))

    parity(make, backend=backend)


def test_hook_removed_inside_the_step():
    def make() -> Program:
        first, second = nn.Linear(6, 8), nn.Linear(8, 3)
        seen: list[str] = []

        def step(x, y):
            hidden = torch.relu(first(x))
            handle = hidden.register_hook(lambda grad: seen.append("removed"))
            hidden.register_hook(lambda grad: seen.append("kept"))
            handle.remove()
            loss = F.cross_entropy(second(hidden), y)
            loss.backward()
            first.zero_grad(), second.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (first, second, seen))

    parity(make)


def test_module_hooks():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        log: list[object] = []
        model[0].register_forward_pre_hook(lambda module, args: log.append("pre"))
        model[0].register_forward_hook(lambda module, args, out: log.append(("forward", out.shape[0])))
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model[3].register_full_backward_hook(lambda module, gin, gout: log.append(gout[0].norm()))
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        model[0].bias.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), ([*model.parameters()], optimizer, log))

    parity(make)


def test_optimizer_step_hooks():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        log: list[str] = []
        optimizer.register_step_pre_hook(lambda o, args, kwargs: log.append("before"))
        optimizer.register_step_post_hook(lambda o, args, kwargs: log.append("after"))

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), ([*model.parameters()], log))

    parity(make)


def test_counter_read_next_step():
    """A Python number written by one step decides the arithmetic of the next."""

    def body(self, loss, x):
        scale = 1.0 / (1 + self.calls)
        self.calls += 1
        return loss.detach() * scale + self.calls

    check(body, fields=lambda: {"calls": 0})


def test_property_and_setattr():
    class Tracked:
        def __init__(self):
            self.log = []
            self._value = 0

        @property
        def value(self):
            return self._value

        @value.setter
        def value(self, new):
            self.log.append(new)
            self._value = new

        def __setattr__(self, name, new):
            object.__setattr__(self, name, new)

    def body(self, loss, x):
        self.tracked.value = self.tracked.value + 1

    check(body, fields=lambda: {"tracked": Tracked()})


def test_dataclass_and_slots():
    @dataclasses.dataclass
    class Metrics:
        steps: int = 0
        loss: object = None

    class Slotted:
        __slots__ = ("n",)

        def __init__(self):
            self.n = 0

    def body(self, loss, x):
        self.metrics.steps += 1
        self.metrics.loss = loss.detach()
        self.slotted.n += 2
        self.made = Metrics(self.metrics.steps, loss.detach())

    check(body, fields=lambda: {"metrics": Metrics(), "slotted": Slotted(), "made": None}, captures=2)


def test_new_objects_escape():
    def body(self, loss, x):
        made = Plain()
        made.loss, made.back = loss.detach(), self
        self.items.append(made)

    check(body, fields=lambda: {"items": []})


def test_function_created_in_the_step_escapes():
    """A closure created by the step works outside, over real cells."""
    made = []

    def make() -> Program:
        model = mlp()
        results: list[object] = []
        made.clear()

        def step(x, y):
            scale = model(x).detach().mean()
            count = 0

            def later(amount):
                nonlocal count
                count += amount
                return scale * count

            made.append(later)
            return scale

        program = Program(step, batches((5, 6), classes=3), (results,))
        program.results = results  # type: ignore[attr-defined]
        return program

    def between(program, index):
        if made:
            program.results.extend([made[-1](2), made[-1](3)])

    parity(make, between=between)


def test_generators_and_context_managers():
    class Timer:
        def __init__(self, log):
            self.log = log

        def __enter__(self):
            self.log.append("enter")
            return self

        def __exit__(self, *exc):
            self.log.append("exit" if exc[0] is None else exc[0].__name__)
            return True

    def body(self, loss, x):
        def numbers():
            for n in range(3):
                self.log.append(n)
                yield n

        with Timer(self.log):
            self.total = sum(n * n for n in numbers())
            raise KeyError("swallowed")

    check(body, fields=lambda: {"log": [], "total": 0}, captures=2)


def test_exceptions_inside_the_step():
    def body(self, loss, x):
        try:
            self.log.append("try")
            {}["missing"]
        except KeyError as error:
            self.log.append(str(error))
        finally:
            self.log.append("finally")

    check(body, fields=lambda: {"log": []})


def test_effects_in_a_submodule():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.calls = 0
            self.outputs = []
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            self.seen += x.shape[0]
            out = self.body(x)
            self.outputs.append(out.detach().mean())
            return out

    def make() -> Program:
        model = Counting()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make)


def test_returned_structure():
    def body(self, loss, x):
        view = x[1:]
        return {"x": x, "view": view, "pair": (loss.detach(), [x, view]), "none": None, "n": x.shape[0]}

    check(body)


def test_results_that_alias_inputs():
    """Results share memory with arguments exactly where eager's do."""
    model = nn.Linear(3, 3)

    def step(x):
        model(x)
        return x, x[1:], x.t(), x.clone(), x.detach()

    compiled = sidefx_train.compile(step, backend="inductor", fullgraph=True, on_failure="raise")
    for _ in range(3):
        x = torch.randn(4, 3)
        same, rows, turned, clone, detached = compiled(x)
        assert same is x, "the argument itself was returned"
        x.fill_(7)
        assert bool((rows == 7).all() and (turned == 7).all() and (detached == 7).all()), "views lost their base"
        assert not bool((clone == 7).any()), "the clone shares memory"
        assert turned.shape == (3, 4), f"{turned.shape}"


def test_argument_changed_in_place():
    def make() -> Program:
        data = batches((4, 4))

        def step(x):
            x.mul_(2)
            row = x[0]
            row.add_(1)
            return row.sum()

        return Program(step, data)

    parity(make)


@pytest.mark.parametrize("nan_at", [None, 3])
def test_metric_object(nan_at):
    """torchmetrics: Python state and tensor state of a metric updated in the step, with and without a NaN."""
    import torchmetrics

    def make() -> Program:
        model = mlp()
        metric = torchmetrics.MeanMetric()
        data = batches((5, 6), classes=3)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            metric.update(loss.detach())
            return metric.compute()

        def batch(index):
            x, y = data(index)
            return (x * float("nan") if index == nan_at else x), y

        made = Program(step, batch)
        made.metric = metric  # type: ignore[attr-defined]
        return made

    def between(made, index):
        metric = made.metric
        made.watch = (metric.mean_value.clone(), metric.weight.clone(), metric.update_count)

    if nan_at is None:
        parity(make, between=between, captures=2)
    else:
        with pytest.warns(UserWarning, match="nan"):
            parity(make, between=between, captures=2)


def test_metric_that_is_called():
    """``metric(preds, target)`` returns the batch's value and updates the running one."""
    import torchmetrics

    def make() -> Program:
        model = mlp()
        metric = torchmetrics.classification.MulticlassAccuracy(3)

        def step(x, y):
            return metric(model(x), y)

        made = Program(step, batches((5, 6), classes=3))
        made.metric = metric  # type: ignore[attr-defined]
        return made

    def between(made, index):
        made.watch = (made.metric.tp.clone(), made.metric.update_count)

    parity(make, between=between, captures=2)


def test_print_of_an_object_the_step_has_changed():
    """The printed text shows the object with the step's changes before the print."""

    class Meter:
        def __init__(self):
            self.n = 0

        def __repr__(self):
            return f"Meter({self.n})"

    def body(self, loss, x):
        self.meter.n += x.shape[0]
        print(self.meter, "after", self.calls)
        self.calls += 1

    check(body, fields=lambda: {"meter": Meter(), "calls": 0})
