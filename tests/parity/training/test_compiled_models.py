"""``net = sidefx_train.compile(net)`` replaces the model wherever a model is used."""

from __future__ import annotations

import abc
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sidefx_train


class Net(nn.Module):
    """A model with the usual members: children, buffers, attributes, a property, methods."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.factor = 1.0
        self.report = "the model's own"

    @property
    def width(self):
        return self.last.in_features

    def features(self, x):
        return torch.relu(self.norm(self.first(x)))

    def forward(self, x):
        self.seen += len(x)
        return self.last(self.features(x)) * self.scale * self.factor


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


def made(backend="eager", make=Net):
    torch.manual_seed(0)
    net = make()
    return net if backend is None else sidefx_train.compile(net, backend=backend)


def train(net, steps=4, first=0):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for i in range(first, first + steps):
        x, y = batch(i)
        net.zero_grad()
        (net(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return {name: value.clone() for name, value in net.state_dict().items()}


def equal(a, b, exact=True):
    assert list(a) == list(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]) if exact else torch.allclose(value, b[name], atol=1e-5), name


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_trained(backend):
    expected, net = train(made(None)), made(backend)
    equal(expected, train(net), exact=backend == "eager")
    assert sidefx_train.explain(net).replays == 4


def test_names_and_classes():
    plain, net = made(None), made()
    assert isinstance(net, Net) and isinstance(net, nn.Module) and net.__class__ is Net
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in net.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert list(net.state_dict()) == list(plain.state_dict())
    assert repr(net) == repr(plain)
    assert net.width == 6 and net.report == "the model's own"
    holder = nn.ModuleDict({"net": net})
    assert list(holder.state_dict()) == [f"net.{name}" for name in plain.state_dict()]


def test_attributes_are_the_models():
    torch.manual_seed(0)
    plain = Net()
    net = sidefx_train.compile(plain, backend="eager")
    x, _ = batch(0)
    one = net(x)
    net.factor = 2.0
    assert plain.factor == 2.0 and net.first is plain.first and net.scale is plain.scale
    assert torch.allclose(net(x), 2 * one)
    net.extra = nn.Linear(1, 1)
    assert "extra.weight" in plain.state_dict()
    del net.extra
    assert not hasattr(plain, "extra")
    net.eval()
    assert not plain.training and not plain.norm.training
    assert torch.equal(net(x), plain(x))
    net.double()
    assert plain.scale.dtype == torch.float64 and net(x.double()).dtype == torch.float64
    assert net.float() is net
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        net.nothing  # noqa: B018
    assert torch.equal(net.features(x), plain.features(x))


def test_container():
    torch.manual_seed(0)
    net = sidefx_train.compile(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), backend="eager")
    assert len(net) == 3 and net[0].weight.shape == (5, 4) and [type(m).__name__ for m in net][1] == "ReLU"
    x, _ = batch(0)
    before = net(x)
    net[1] = nn.Tanh()
    net.append(nn.Sigmoid())
    assert not torch.equal(net(x), before) and torch.equal(net(x), nn.Sequential(*net)(x))
    assert torch.equal(net[:2](x), net[1](net[0](x)))


def test_a_model_is_found_by_either():
    torch.manual_seed(0)
    plain = Net()
    net = sidefx_train.compile(plain, backend="eager")
    assert net == plain and plain == net and {plain: 1}[net] == 1 and net != Net()
    assert len(list(nn.ModuleList([plain, net]).named_modules())) == 1 + len(list(plain.named_modules()))


def test_state_dict_loads_both_ways():
    state = train(made(None))
    net = made()
    assert str(net.load_state_dict(state)) == "<All keys matched successfully>"
    equal(state, net.state_dict())
    other = made(None)
    other.load_state_dict(net.state_dict())
    x, _ = batch(9)
    assert torch.equal(net.eval()(x), other.eval()(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copied(how):
    net = made()
    train(net)
    if how == "deepcopy":
        copied = copy.deepcopy(net)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(net))
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    equal(net.state_dict(), copied.state_dict())
    assert copied.scale is not net.scale and copied.report == net.report
    equal(train(net, first=4), train(copied, first=4))
    assert sidefx_train.explain(copied).replays == 4 and copied.__class__ is Net


def test_shallow_copy_shares_the_parameters():
    net = made()
    copied = copy.copy(net)
    assert copied.scale is net.scale
    copied.factor = 3.0
    assert net.factor == 1.0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_hooks(backend):
    def run(net):
        seen = []
        x, y = batch(0)
        net(x)
        handles = [
            net.register_forward_pre_hook(lambda m, args: seen.append(type(m).__name__)),
            net.register_forward_hook(lambda m, args, out: out * 2),
            net.first.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape))),
            net.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].sum().item())),
        ]
        (net(x) - y).square().mean().backward()
        for handle in handles:
            handle.remove()
        (net(x) - y).square().mean().backward()
        return seen, [p.grad.clone() for p in net.parameters()]

    (seen, grads), (ours, our_grads) = run(made(None)), run(made(backend))
    assert seen[:2] == ours[:2] and seen[2] == pytest.approx(ours[2], abs=1e-5)
    for a, b in zip(grads, our_grads, strict=True):
        assert torch.equal(a, b) if backend == "eager" else torch.allclose(a, b, atol=1e-5)


def test_functional_call():
    plain, net = made(None), made()
    x, _ = batch(0)
    others = {name: p.detach() + 1 for name, p in plain.named_parameters()}
    for _ in range(3):
        expected = torch.func.functional_call(plain, others, (x,))
        assert torch.equal(torch.func.functional_call(net, others, (x,)), expected)
    equal(plain.state_dict(), net.state_dict())


def test_averaged():
    def run(net):
        averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for i in range(3):
            train(net, steps=1, first=i)
            averaged.update_parameters(net)
        return averaged.state_dict(), averaged.eval()(batch(7)[0])

    (state, out), (ours, our_out) = run(made(None)), run(made())
    equal(state, ours)
    assert torch.equal(out, our_out)


def test_parametrized():
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    x, _ = batch(0)
    outs = []
    for backend in (None, "eager"):
        net = made(backend)
        net(x)
        parametrize.register_parametrization(net, "scale", Double())
        parametrize.register_parametrization(net.first, "weight", Double())
        outs.append((net(x), sorted(net.state_dict()), net.scale.item(), type(net.first).__name__))
        parametrize.remove_parametrizations(net, "scale")
        outs[-1] += (net(x), net.__class__ is Net)
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][4], outs[1][4])
    assert outs[0][1:4] == outs[1][1:4] and outs[0][5] == outs[1][5]


class Registered(nn.Module):
    """A class that keeps a list of its subclasses."""

    known: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Registered.known.append(cls.__name__)

    def forward(self, x):
        return x + 1


class Derived(Registered):
    pass


class Meta(type):
    made: list[str] = []  # noqa: RUF012

    def __new__(mcls, name, bases, namespace):
        Meta.made.append(name)
        return super().__new__(mcls, name, bases, namespace)


class WithMeta(nn.Module, metaclass=Meta):
    def forward(self, x):
        return x + 1


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x): ...


class Concrete(Abstract):
    def forward(self, x):
        return x + 1


class WithSlots(nn.Module):
    __slots__ = ("place",)

    def forward(self, x):
        return x + 1


class CallsItself(nn.Module):
    """Overrides ``__call__``."""

    def __call__(self, x, times=1):
        return super().__call__(x) if times == 1 else self(self(x), times - 1)

    def forward(self, x):
        return x + 1


class AnswersForAll(nn.Module):
    """Overrides ``__getattr__``."""

    def __getattr__(self, name):
        if name.startswith("made_"):
            return name[5:]
        return super().__getattr__(name)

    def forward(self, x):
        return x + 1


KINDS = [Derived, WithMeta, Concrete, WithSlots, CallsItself, AnswersForAll]


@pytest.mark.parametrize("cls", KINDS)
def test_kinds_of_classes(cls):
    known, by_meta = list(Registered.known), list(Meta.made)
    net = sidefx_train.compile(cls(), backend="eager")
    assert torch.equal(net(torch.zeros(2)), torch.ones(2)) and isinstance(net, cls)
    assert (Registered.known, Meta.made) == (known, by_meta)
    assert not isinstance(cls(), type(net)) and isinstance(net, type(net))
    assert torch.equal(copy.deepcopy(net)(torch.zeros(2)), torch.ones(2))
    assert torch.equal(pickle.loads(pickle.dumps(net))(torch.zeros(2)), torch.ones(2))


def test_special_classes():
    assert torch.equal(sidefx_train.compile(CallsItself(), backend="eager")(torch.zeros(2), 3), torch.full((2,), 3.0))
    net = sidefx_train.compile(AnswersForAll(), backend="eager")
    assert net.made_up == "up" and net.training is True
    lazy = sidefx_train.compile(nn.LazyLinear(3), backend="eager")
    assert lazy(torch.ones(2, 4)).shape == (2, 3) and lazy.in_features == 4 and lazy.weight.shape == (3, 4)


def test_in_a_compiled_step():
    """It is part of that step."""

    def run(backend):
        net = made(backend)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = step if backend is None else sidefx_train.compile(step, backend=backend, fullgraph=True)
        losses = [call(*batch(i)).item() for i in range(4)]
        return losses, net.state_dict(), call

    losses, state, _ = run(None)
    ours, our_state, call = run("eager")
    assert losses == ours and (call.report().replays, len(call.report().captures)) == (4, 1)
    equal(state, our_state)


def test_looked_into_by_a_compiled_step():
    def run(backend):
        net = made(backend)
        holder = nn.ModuleDict({"net": net})

        def step(x):
            loss = net(x).square().mean()
            loss.backward()
            norm = sum(p.grad.norm() for p in holder.parameters())
            names = [name for name, _ in holder.named_modules()]
            net.zero_grad()
            return norm, names, {net: 1}[net], net in [net], isinstance(net, Net), net.factor

        call = step if backend is None else sidefx_train.compile(step, backend=backend, fullgraph=True)
        return [call(batch(i)[0]) for i in range(3)]

    for plain, ours in zip(run(None), run("eager"), strict=True):
        assert torch.equal(plain[0], ours[0]) and plain[1:] == ours[1:]


def test_compiled_twice_is_compiled_once():
    net = made()
    again = sidefx_train.compile(net, backend="aot_eager")
    assert again == net and sidefx_train.explain(again).backend == "aot_eager"
    x, _ = batch(0)
    again(x)
    assert sidefx_train.explain(net).calls == 0


def test_methods_of_a_step():
    net = sidefx_train.compile(nn.Linear(4, 2), backend="eager")
    net(torch.ones(1, 4))
    assert net.report().calls == 1 and net.config.backend == "eager" and net.wait(1)
    assert type(net.__wrapped__) is nn.Linear
    net.reset()
    assert net.report().calls == 0


@sidefx_train.compile(backend="eager")
def decorated(x):
    return x + 1


def test_compiled_steps_are_copied_and_pickled():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    copied = copy.deepcopy(decorated)
    assert copied is not decorated and torch.equal(copied(torch.zeros(2)), torch.ones(2))

    holder = Holder()
    holder.step(torch.ones(2))
    copied = copy.deepcopy(holder)
    copied.step(torch.ones(2))
    assert (holder.total.tolist(), copied.total.tolist()) == ([1.0, 1.0], [2.0, 2.0])


class Holder:
    """Its method is compiled per instance."""

    def __init__(self):
        self.total = torch.zeros(2)

    @sidefx_train.compile(backend="eager")
    def step(self, x):
        self.total = self.total + x
