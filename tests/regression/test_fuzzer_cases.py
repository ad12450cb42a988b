"""Cases found by the fuzzer: each one was silently wrong or failed once."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, parity


class Plain:
    """An instance of a user class."""


class Doubling(list):
    """A list with overridden methods."""

    def append(self, value):
        super().append(value)
        super().append(value)


class Boxing(dict):
    """A dict with overridden methods."""

    def __setitem__(self, key, value):
        super().__setitem__(key, [value])


class Ring(collections.deque):
    """A user's subclass of deque."""


class Slotted:
    """An object with slots, one of which is unset."""

    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1


class Open(Slotted):
    """Slots below a class with a ``__dict__``."""


class Named:
    """An object with its own ``__repr__``."""

    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return f"Named({self.n})"


class Dying:
    """An object with a ``__del__`` that has an effect."""

    died = 0

    def __del__(self):
        Dying.died += 1


def check(body, *, steps=3, captures=None, between=None, **fields):
    """Checks parity of ``body(box, x)`` on a box whose fields are made by the functions given."""

    def make() -> Program:
        box = Plain()
        for name, value in fields.items():
            setattr(box, name, value())
        return Program(lambda x: body(box, x), lambda index: (torch.ones(2) + index,), (box,))

    return parity(make, steps=steps, captures=captures, between=between)


def test_weak_references_point_at_the_real_objects():
    other = Plain()
    box = Plain()
    box.ref, box.refs, box.keys = None, weakref.WeakSet(), weakref.WeakKeyDictionary({other: 1})

    def step(x):
        box.ref = weakref.ref(other)
        box.refs.add(other)
        box.keys[other] = box.keys.get(other, 5) + 1
        return x * 2, box.ref() is other, other in box.refs, len(box.refs)

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    for index in range(3):
        _, same, inside, count = compiled(torch.ones(2))
        assert (same, inside, count) == (True, True, 1), f"call {index}: {same} {inside} {count}"
        assert box.ref() is other and list(box.refs) == [other] and box.keys[other] == index + 2
    del step, compiled
    box.refs.discard(other)
    assert len(box.refs) == 0, "the set kept a reference of its own"


def test_an_entry_does_not_keep_a_weakly_reached_object_alive():
    box = Plain()
    other = Plain()
    other.n = 1
    box.ref = weakref.ref(other)

    def step(x):
        held = box.ref()
        return x * (0 if held is None else held.n)

    compiled = sidefx_train.compile(step, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [1, 1]
    del other
    gc.collect()  # objects that the capture itself held
    assert box.ref() is None, "the entry keeps the object alive"
    assert compiled(torch.ones(2)).tolist() == [0, 0], "a dead reference was replayed as a live one"


@pytest.mark.parametrize(
    "change",
    [
        lambda box: box.loud.append(1),
        lambda box: box.boxing.__setitem__("k", 1),
        lambda box: box.ring.append(len(box.ring)),
        lambda box: box.ring.rotate(1),
    ],
    ids=["list", "dict", "deque", "rotate"],
)
def test_containers_whose_class_overrides_their_methods(change):
    def body(box, x):
        change(box)
        return x * 2

    check(body, loud=lambda: Doubling([0]), boxing=Boxing, ring=lambda: Ring([1, 2], 3))


def test_order_of_attributes():
    def body(box, x):
        del box.a
        box.a = 1
        vars(box).update(late=1)
        box.later = 2
        box.order = [*vars(box)]
        return x * 2

    check(body, a=int, b=int, c=int)


def test_attributes_deleted_through_the_dict():
    def body(box, x):
        vars(box).pop("a", None)
        return x * 2

    check(body, a=int, b=int)


def test_slots():
    def body(box, x):
        for held in (box.plain, box.open):
            if hasattr(held, "b"):
                del held.b
            else:
                held.b = [held.a]
            held.a += 1
        box.open.extra = 1
        return x * 2

    check(body, steps=5, plain=Slotted, open=Open)


def test_print_shows_what_was_there_when_it_ran():
    def body(box, x):
        print(box.table, box.recent, box.named, [box.named])
        box.table["k"] = 1
        box.recent.append(1)
        box.named.n += 1
        print(box.table, box.recent, box.named)
        return x * 2

    check(body, table=collections.OrderedDict, recent=collections.deque, named=lambda: Named(1))


def test_order_of_an_ordered_dict():
    def body(box, x):
        box.table.move_to_end("a")
        print(box.table)
        made = collections.OrderedDict(c=1, d=2)
        made.move_to_end("c")
        box.made = made
        return x * 2

    check(body, table=lambda: collections.OrderedDict(a=1, b=2))


def test_a_list_that_holds_itself():
    def body(box, x):
        box.items.append(box.items)
        print(len(box.items), bool(box.items))
        del box.items[:]
        return x * 2

    check(body, items=list)


def test_a_partial_is_a_new_one_every_time():
    def body(box, x):
        box.fns.append(functools.partial(int.__add__, len(box.fns)))
        return x * 2, len(set(map(id, box.fns))) == len(box.fns)

    check(body, fns=list)


def test_a_set_made_of_an_outside_list():
    def body(box, x):
        box.names = set(box.items)
        box.counts = collections.Counter(box.items)
        return x * 2

    check(body, items=lambda: [1, 2, 2])


def test_a_class_made_in_the_step_holds_no_symbolic_number():
    def make() -> Program:
        box = Plain()
        box.n = 1

        def step(x):
            class Local:
                k = box.n + 4

            box.n = Local().k
            return x * 2

        return Program(step, lambda index: (torch.ones(2),), (box,))

    parity(make, steps=4, captures=None, whole=False)


def test_stand_ins_die_silently():
    box = Plain()
    box.dying = Dying()
    box.dying.n = 1

    def step(x):
        return x * box.dying.n

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [1, 1]
    assert Dying.died == 0, "a shadow was finalized"
    del box.dying


def test_a_c_object_is_never_changed_by_a_capture():
    import array

    box = Plain()
    box.data = array.array("d", [1.0])

    def step(x):
        box.data.append(2.0)
        return x * 2

    compiled = sidefx_train.compile(step, backend="eager")
    for calls in range(1, 4):
        compiled(torch.ones(2))
        assert len(box.data) == 1 + calls, f"after {calls} calls: {box.data}"


@pytest.mark.parametrize("fn", [str, repr, hex, float, bool])
def test_a_symbolic_number_under_a_c_function_passed_to_map(fn):
    def body(box, x):
        box.n += 4
        box.it = tuple(map(fn, [box.n, 3]))
        return x * 2

    check(body, n=int)


def test_a_condition_on_a_converted_number():
    def body(box, x):
        box.n += 4
        box.sorted = sorted([box.n, 3, 11], key=float)
        box.high = float(box.n) > 9.5
        return x * 2

    check(body, n=int, steps=4)


def test_a_hook_left_on_a_parameter():
    """Each call adds one more hook, and all of them run from then on."""

    def make() -> Program:
        weight = torch.nn.Parameter(torch.arange(4.0))

        def step(x):
            weight.register_hook(lambda grad: grad * 0.5)
            (weight * x).sum().backward()
            return x * 2

        return Program(step, lambda index: (torch.ones(4),), (weight,))

    parity(make, steps=4, captures=None, whole=False)


class Vague:
    """Its truth value raises if it has no ``n``."""

    def __getattr__(self, name):
        raise AttributeError(name)

    def __len__(self):
        return self.n


def test_an_error_about_an_object_without_truth_value():
    def body(box, x):
        try:
            box.vague.nothing  # noqa: B018 - the access is the test
        except AttributeError as error:
            print(error, error.name)
        return x * 2

    def make() -> Program:
        box = Plain()
        box.vague = Vague()
        return Program(lambda x: body(box, x), lambda index: (torch.ones(2),), (box,))

    parity(make, steps=3)


@pytest.mark.parametrize("convert", [int, float])
def test_the_number_of_a_condition_on_a_tensor(convert):
    def make() -> Program:
        box = Plain()
        box.n = 0

        def step(x):
            box.n = convert(x.sum() > 2)
            return x * 2

        return Program(step, lambda index: (torch.ones(2) * index,), (box,))

    parity(make, steps=4)


def test_a_loop_over_as_many_as_a_tensor_says():
    def make() -> Program:
        box = Plain()
        box.seen = []

        def step(x):
            try:
                for index in range(int(x.sum())):
                    box.seen.append(index)
            except Exception as error:
                box.seen.append(type(error))
            return x * 2

        return Program(step, lambda index: (torch.ones(2) * index,), (box,))

    parity(make, steps=4, captures=None, whole=False)


class Operand:
    """Defines its own operators, which are called with a tensor or a number that is an input of the graph."""

    def __init__(self, n):
        self.n, self.log = n, []

    def __getattr__(self, name):
        raise AttributeError(name)

    def __add__(self, other):
        self.n += 1
        return other * self.n

    def __radd__(self, other):
        self.n += 2
        return self.n * other

    def __matmul__(self, other):
        self.n += 1
        return other @ other

    def __getitem__(self, key):
        self.n += 1
        return key + self.n

    def __setitem__(self, key, value):
        self.log.append(key)

    def __contains__(self, key):
        self.n += 3
        return True

    def __eq__(self, other):
        self.log.append("eq")
        return True

    def __lt__(self, other):
        self.log.append("lt")
        return False

    def __imul__(self, other):
        self.log.append("imul")
        return self

    __hash__ = object.__hash__


def test_operators_of_objects_with_tensors_and_symbolic_numbers():
    def make() -> Program:
        owner = Operand(1)

        def step(x, k):
            found = [
                owner + x,
                x + owner,
                owner @ x,
                owner[k],
                k in owner,
                owner == x,
                owner < x,
                x == owner,
                k == owner,
            ]
            owner[k] = 3
            same = owner
            same *= k
            return found, owner + k, k + owner, owner < k, same is owner

        return Program(step, lambda index: (torch.ones(2, 2), 3 + index), (owner,))

    parity(make, steps=6, captures=None)


def test_a_class_whose_fallback_is_replaced():
    def make() -> Program:
        Operand.__getattr__ = _no_attribute
        owner, counts = Operand(2), [1]

        def step(x):
            counts.append(1)
            return x * (owner + len(counts))

        return Program(step, lambda index: (torch.ones(2),), (owner, counts))

    def between(program, index):
        if index == 1:
            Operand.__getattr__ = lambda self, name: 9

    try:
        parity(make, steps=5, captures=None, between=between)
    finally:
        Operand.__getattr__ = _no_attribute


def _no_attribute(self, name):
    raise AttributeError(name)


def test_a_view_of_an_input_that_begins_to_require_gradients():
    """Torch cannot make a fake tensor of such a view after that of its old base; this was an internal error."""

    def make() -> Program:
        owner, model = Plain(), torch.nn.Linear(3, 2)
        owner.other, owner.x = 1, torch.randn(4, 3)
        owner.row = owner.x[0]

        def step(x):
            same = owner.row is owner.other
            model(x).sum().backward()
            return same

        return Program(step, lambda index: (owner.x,), (owner, model))

    def between(program, index):
        owner = program.watch[0]
        if index == 1:
            owner.x = owner.x.clone().requires_grad_()
        owner.row = owner.x[0]

    report = parity(make, steps=5, captures=None, between=between, whole=False)
    assert not [item for item in report.fallbacks if item.code == "SFX204"], report


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_draws_go_along_the_memory(backend):
    """Without in-place operations torch draws booleans in order of position, whatever the layout."""

    def step(x):
        image = x.view(2, 3, 4, 2).to(memory_format=torch.channels_last)
        transposed = x.view(6, 8).t().contiguous().t()
        drawn = [F.dropout(transposed), F.dropout(image), torch.zeros(6, 4, 2).permute(2, 1, 0).random_(9)]
        return [*drawn, torch.empty_like(transposed).uniform_()]

    compiled = sidefx_train.compile(step, backend=backend, rng="eager")
    for seed in range(2):
        torch.manual_seed(seed)
        want = step(torch.ones(48))
        torch.manual_seed(seed)
        have = compiled(torch.ones(48))
        for a, b in zip(want, have, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
    assert compiled.report().replays == 2


def test_a_dict_that_loses_keys_while_a_loop_walks_through_it():
    """Whether Python raises depends on the gaps in the dict, which its shadow does not have."""

    def make() -> Program:
        owner = Plain()
        owner.table = {"a": 1, "b": 2, "c": 3}

        def step(x):
            for _, value in owner.table.items():
                x = x + value
                owner.table["b"] = owner.table.pop("b")
            return x

        return Program(step, lambda index: (torch.ones(2),), (owner,))

    parity(make, steps=4, captures=None, whole=False)


def test_a_stored_method_of_a_list_runs_once():
    """A bound method of a C object held by the program ran on the object itself during capture."""

    def make() -> Program:
        owner = Plain()
        owner.rows = [[1], [2]]
        owner.add, owner.has = owner.rows[0].append, owner.rows[1].__contains__
        owner.later = functools.partial(owner.rows[1].append, 7)

        def step(x):
            with contextlib.ExitStack() as stack:
                stack.callback(owner.rows[0].append, sum(map(lambda v: v * 2, owner.rows[0])))
                owner.add(len(owner.rows[0]))
                owner.later()
                owner.seen = x.detach().numpy().copy().tolist()
            return x + owner.has(7) + len(owner.rows[0])

        return Program(step, lambda index: (torch.ones(2),), (owner,))

    parity(make, steps=4, captures=None, whole=False)
