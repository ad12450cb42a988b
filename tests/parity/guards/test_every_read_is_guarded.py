"""No stale replay: after a change of anything the step read, the next call gives eager's result."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, classifier, mlp, parity

SCALE = 1.0
TABLE = {"scale": 1.0}


class Flagged(nn.Module):
    """A model that reads flags, globals, a ModuleList and a default argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)
        self.residual = False
        self.scale = 1.0
        self.activation = torch.relu

    def forward(self, x):
        for layer in self.layers:
            new = self.activation(layer(x))
            x = x + new if self.residual else new
        return self.head(self.drop(x)) * self.scale * SCALE * TABLE["scale"]


def make(cls=torch.optim.AdamW) -> Program:
    global SCALE
    SCALE = TABLE["scale"] = 1.0
    model = Flagged()
    return classifier(model, cls(model.parameters(), lr=0.01), batches((5, 6), classes=3))


def changes(**at):
    """Returns a ``between`` that applies ``at["c4"]`` before call 4, and so on."""

    def between(program: Program, index: int) -> None:
        change = at.get(f"c{index}")
        if change is not None:
            change(*program.watch)

    return between


def replace_parameter(model, optimizer):
    model.head.weight = nn.Parameter(torch.full_like(model.head.weight, 0.1))


def set_data(model, optimizer):
    model.head.weight.data = torch.full_like(model.head.weight, 0.1)


def set_data_shape(model, optimizer):
    model.head.weight.data = model.head.weight.data.t().contiguous().t()


def copy_in_place(model, optimizer):
    with torch.no_grad():
        model.head.weight.copy_(torch.full_like(model.head.weight, 0.1))


def load_model(model, optimizer):
    model.load_state_dict({k: torch.full_like(v, 0.05) for k, v in model.state_dict().items()})


def load_model_assign(model, optimizer):
    model.load_state_dict({k: torch.full_like(v, 0.05) for k, v in model.state_dict().items()}, assign=True)


def load_optimizer(model, optimizer):
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.003
    for values in state["state"].values():
        values["exp_avg"] = torch.zeros_like(values["exp_avg"])
    optimizer.load_state_dict(state)


def set_global(value):
    def change(model, optimizer):
        global SCALE
        SCALE = value

    return change


def append_layer(model, optimizer):
    model.layers.append(nn.Linear(6, 6))
    nn.init.constant_(model.layers[-1].weight, 0.1)
    nn.init.constant_(model.layers[-1].bias, 0.1)


def add_group(model, optimizer):
    append_layer(model, optimizer)
    optimizer.add_param_group({"params": list(model.layers[-1].parameters()), "lr": 0.1})


def halve(module, args, out):
    return out * 0.5


CHANGES = {
    "eval_train": {"c3": lambda m, o: m.eval(), "c6": lambda m, o: m.train()},
    "submodule_eval": {"c3": lambda m, o: m.drop.eval()},
    "flag": {"c3": lambda m, o: setattr(m, "residual", True), "c6": lambda m, o: setattr(m, "residual", False)},
    "float_attribute": {"c3": lambda m, o: setattr(m, "scale", 2.0)},
    "function_attribute": {"c3": lambda m, o: setattr(m, "activation", torch.tanh)},
    "dropout_rate": {"c3": lambda m, o: setattr(m.drop, "p", 0.1)},
    "replaced_parameter": {"c3": replace_parameter},
    "requires_grad": {
        "c3": lambda m, o: m.head.weight.requires_grad_(False),
        "c6": lambda m, o: m.head.weight.requires_grad_(True),
    },
    "data": {"c3": set_data},
    "data_strides": {"c3": set_data_shape},
    "copy_in_place": {"c3": copy_in_place},
    "load_model": {"c3": load_model},
    "load_model_assign": {"c3": load_model_assign},
    "load_optimizer": {"c3": load_optimizer},
    "global": {"c3": set_global(2.0), "c6": set_global(1.0)},
    "global_dict": {"c3": lambda m, o: TABLE.update(scale=3.0)},
    "appended_layer": {"c3": append_layer},
    "added_param_group": {"c3": add_group},
    "replaced_layer": {"c3": lambda m, o: m.layers.__setitem__(0, nn.Identity())},
    "deleted_layer": {"c3": lambda m, o: m.layers.__delitem__(0)},
    "forward_hook": {"c3": lambda m, o: m.head.register_forward_hook(halve)},
    "tensor_hook": {"c3": lambda m, o: m.head.weight.register_hook(lambda g: g * 0.5)},
    "replaced_forward": {"c3": lambda m, o: setattr(m.head, "forward", lambda x: x[:, :3] * m.head.weight[0, 0])},
    "grad_present": {"c3": lambda m, o: setattr(m.head.weight, "grad", torch.ones_like(m.head.weight))},
    "zeroed_state": {"c3": lambda m, o: o.state.clear()},
    "optimizer_flag": {"c3": lambda m, o: o.param_groups[0].__setitem__("amsgrad", False)},
    "maximize": {"c3": lambda m, o: o.param_groups[0].__setitem__("maximize", True)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_between_calls(name):
    report = parity(make, between=changes(**CHANGES[name]), captures=None, rng="eager")
    assert len(report.captures) <= 4, f"more captures than changes:\n{report}"


def test_going_back_reuses_the_old_capture():
    """train -> eval -> train again: two captures, not three."""
    between = changes(**CHANGES["eval_train"])
    parity(make, between=between, captures=2, rng="eager")


def test_recapture_names_the_value():
    report = parity(make, between=changes(**CHANGES["flag"]), captures=2, rng="eager")
    (recapture,) = report.recaptures
    assert "residual" in recapture.source, f"{recapture}"
    assert (recapture.old, recapture.new) == ("False", "True"), f"{recapture}"
    assert recapture.location is not None and recapture.location.file.endswith("test_every_read_is_guarded.py"), (
        f"{recapture}"
    )


# With Inductor, tests/parity/guards/test_dynamic_shapes.py trains on changing sizes.
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_new_batch_shape(backend):
    def build() -> Program:
        made = make()
        made.batch = lambda i: batches(((5, 3, 7, 5)[i % 4], 6), classes=3)(i)
        made.watch[0].drop.p = 0.0
        return made

    parity(build, backend=backend, captures=3, steps=12)


def test_new_batch_dtype():
    def build() -> Program:
        made = make()
        data = made.batch
        made.batch = lambda i: (data(i)[0].to(torch.float64 if i in (4, 5) else torch.float32), data(i)[1])
        model = made.watch[0]

        def step(x, y, inner=made.step):
            return inner(x.float(), y), x.sum()

        made.step = step
        model.drop.p = 0.0
        return made

    parity(build, captures=2)


def test_new_batch_strides():
    def build() -> Program:
        made = make()
        made.watch[0].drop.p = 0.0
        data = made.batch
        made.batch = lambda i: (data(i)[0].t().contiguous().t() if i % 3 == 2 else data(i)[0], data(i)[1])
        return made

    parity(build, captures=2)


def test_changed_python_argument():
    def build() -> Program:
        model = mlp()
        data = batches((5, 6), classes=3)

        def step(x, y, weight, names, smooth=0.0):
            loss = F.cross_entropy(model(x), y, label_smoothing=smooth) * weight
            return loss.detach(), len(names)

        return Program(step, lambda i: (*data(i), (1, 1, 2, 0.5)[i % 4], ["a"] * (i // 4)), (model,))

    parity(build, captures=None, steps=12)


def test_aliased_arguments():
    """Two arguments that share memory form another program than two that do not."""

    def build() -> Program:
        def batch(i):
            x = torch.arange(6.0) + i
            return (x, x) if i % 3 == 1 else (x, x[:]) if i % 3 == 2 else (x, x.clone())

        def step(a, b):
            a.add_(1)
            return (a * b).sum(), b.sum()

        return Program(step, batch)

    parity(build, captures=3, steps=12)


@pytest.mark.parametrize("change", ["t", "squeeze", "unsqueeze", "transpose"])
def test_metadata_change_of_an_input_gives_guards_that_hold(change):
    """``x.t_()`` on an input: the guards describe the input at entry, so the next call replays."""

    def build() -> Program:
        model = mlp()

        def step(x):
            if change == "t":
                x.t_()
            elif change == "squeeze":
                x.squeeze_()
            elif change == "unsqueeze":
                x.unsqueeze_(0)
            else:
                x.transpose_(0, 1)
            return x * 2, x.shape

        shape = (4, 1, 3) if change == "squeeze" else (4, 3)
        return Program(step, batches(shape), (model,))

    parity(build, captures=1)


def test_grad_mode_outside():
    """The caller's grad mode is read by the step."""
    model = mlp()

    def step(x):
        return model(x).requires_grad, torch.is_grad_enabled(), model(x).detach()

    compiled = sidefx_train.compile(step, backend="eager", on_failure="raise")
    x = torch.randn(2, 6)
    assert compiled(x)[:2] == (True, True), "grad mode on"
    with torch.no_grad():
        assert compiled(x)[:2] == (False, False), "grad mode off"
    assert compiled(x)[:2] == (True, True), "grad mode on again"


def test_default_dtype_outside():
    def step(x):
        return x + torch.ones(3)

    compiled = sidefx_train.compile(step, backend="eager", on_failure="raise")
    x = torch.zeros(3)
    assert compiled(x).dtype is torch.float32, "float32 default"
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(x).dtype is torch.float64, "float64 default"
    finally:
        torch.set_default_dtype(torch.float32)


def test_reset_forgets():
    made = make()
    compiled = sidefx_train.compile(made.step, backend="eager", rng="eager")
    compiled(*made.batch(0))
    compiled.reset()
    compiled(*made.batch(1))
    assert compiled.report().graph_count == 1, str(compiled.report())


def test_capture_leaves_the_world_alone():
    """Tracing changes nothing outside: state after one call equals the state after one eager call."""
    parity(make, steps=1, rng="eager")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_an_argument_comes_to_share_memory_with_a_parameter(backend):
    """The step writes the parameter and reads the argument: if they share memory, eager reads the written values."""

    def make() -> Program:
        weight = nn.Parameter(torch.arange(4.0))

        def step(x):
            with torch.no_grad():
                weight.mul_(2)
            return x + weight.detach()

        def arguments(index):
            return (weight.detach() if index % 2 else torch.ones(4),)

        return Program(step, arguments, (weight,))

    parity(make, steps=4, backend=backend, captures=None, whole=False)


def test_a_written_argument_comes_to_share_memory_with_a_parameter():
    def make() -> Program:
        weight = nn.Parameter(torch.arange(4.0))

        def step(x):
            x.add_(1)
            return weight.detach() * 2

        return Program(step, lambda index: (weight.detach() if index % 2 else torch.ones(4),), (weight,))

    for backend in ("eager", "aot_eager"):
        parity(make, steps=4, backend=backend, captures=None, whole=False)


def test_two_containers_come_to_be_one():
    """Lists found by path are known by type: if two become one object, both get the appended items."""

    def make() -> Program:
        class Box:
            def __init__(self):
                self.bag = []

        box = Box()
        box.other = Box()

        def step(x):
            box.other.bag.append("in")
            box.bag.append(1)
            box.other.bag.append("out")
            return x * 2

        return Program(step, lambda index: (torch.ones(2),), (box,))

    def between(program, index):
        if index == 2:
            program.watch[0].other.bag = program.watch[0].bag

    parity(make, steps=5, between=between, captures=2)


def test_two_arguments_come_to_be_one_object():
    def make() -> Program:
        lists = [[], []]

        def step(x, a, b):
            a.append(1)
            b.append(2)
            a.append(3)
            return x * 2

        return Program(step, lambda index: (torch.ones(2), lists[0], lists[index // 2 % 2]), lists)

    parity(make, steps=6, captures=2)


def two_layers() -> Program:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(x):
        loss = second(first(x)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, lambda index: (torch.full((2, 3), float(index)),), (first, second))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_parameters_come_to_share_memory(backend):
    """``.data =`` changes only a parameter's memory, which another parameter's update then writes too."""

    def between(program, index):
        first, second = program.watch
        if index == 2:
            first.weight.data = first.weight.data.clone()  # separate memory: no recapture needed
        elif index == 3:
            first.weight.data = second.weight.data
        elif index == 5:
            first.weight.data = second.weight.data.clone()

    parity(two_layers, steps=7, between=between, backend=backend, captures=None, whole=False)


def test_another_address_of_a_tensor_takes_no_recapture():
    program = two_layers()
    step = sidefx_train.compile(program.step, backend="eager")
    for index in range(6):
        step(torch.full((2, 3), float(index)))
        for module in program.watch:
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()
    report = sidefx_train.explain(step)
    assert report.replays == 6 and not report.recaptures, f"{report}"


def test_an_argument_shares_memory_that_a_parameter_has_come_to():
    """The addresses of held tensors are recorded again after they change."""

    def make() -> Program:
        weight = nn.Parameter(torch.arange(4.0))
        places = [torch.arange(4.0), torch.ones(4)]

        def step(x):
            with torch.no_grad():
                weight.mul_(2)
            return x + weight.detach()

        def arguments(index):
            if index == 2:
                weight.data = places[0]
            return (places[0] if index >= 3 else places[1],)

        return Program(step, arguments, (weight, places))

    parity(make, steps=6, captures=None, whole=False)
