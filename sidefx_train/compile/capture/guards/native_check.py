"""Checks guards on objects that an entry holds, with one native call.

Most guards of a step read the same few hundred objects at every call: modules, their dicts, the optimizer's state.
Their sources start at objects that the entry holds, not at the step's arguments, so a small program over them (see
``compile/native/guards/guard_program.py``) needs nothing from the generated function. Without a C++ compiler, and until
the native module is built, the same guards are generated as Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.kinds import KINDS
from sidefx_train.compile.capture.guards.kinds.base import Instruction
from sidefx_train.compile.capture.guards.python_check import (
    HANDLER_RAISED,
    answering_errors,
    tensor_check,
    write_guards,
)
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.common import signal_handlers
from sidefx_train.compile.common.generated_code import compile_function
from sidefx_train.compile.common.type_checks import HEAP_TYPE
from sidefx_train.compile.native import guards_module, guards_ready
from sidefx_train.compile.native.guards.guard_program import LOADS, TESTS

_RELATIONS = frozenset(name for name, kind in KINDS.items() if kind.native and kind.phase == "relation")
_OF_TENSORS = frozenset({"tensor", "storage_sharing"})
_HOOKS = {"_backward_hooks": "hooks", "_post_accumulate_grad_hooks": "late_hooks"}


def split(guards: list[Guard]) -> tuple[list[Guard], list[Guard]]:
    """Returns (guards that a native program can check, the others), each in order."""
    held: list[Guard] = []
    others: list[Guard] = []
    for guard in guards:
        (held if _is_held(guard) else others).append(guard)
    return held, others


def _is_held(guard: Guard) -> bool:
    kind = KINDS[guard.kind]
    if any(source.from_arguments or _is_unreadable(source) for source in (guard.source, *kind.others(guard))):
        return False
    if kind.phase == "tensor":
        return guard.source.kind == "const" and compat.is_plain_strided(guard.source.key)
    return kind.native


def _is_unreadable(source: Source | None) -> bool:
    """Returns True for a source below something that is computed at each read (the tensor over an array), or one that
    reads past the ``__getattribute__`` of an object with slots."""
    while source is not None:
        if source.kind in ("array", "computed", "picked") or (
            source.kind == "slot" and source.parent is not None and source.parent.hooked
        ):
            return True
        source = source.parent
    return False


def object_check(guards: list[Guard]) -> Callable[[], bool]:
    """Returns ``check()``, which is true while all of ``guards`` hold; :func:`split` puts them first.

    Pass globals that refer to the check by name to :func:`follow`.
    """
    return _native_check(guards) if guards_ready() else UntilBuilt(guards)


class UntilBuilt:
    """Checks guards in Python until the native module is built; then replaces itself by the program in all
    followers."""

    def __init__(self, guards: list[Guard]) -> None:
        self._guards = guards
        self._check = _python_check(guards)
        self._callers: list[dict[str, Any]] = []

    def __call__(self) -> bool:
        holds = self._check()
        if holds and self._callers and guards_ready():  # the program is built from the current state
            self._check = _native_check(self._guards)
            for names in self._callers:
                names[CHECK] = self._check
            self._callers.clear()
        return holds

    def follow(self, names: dict[str, Any]) -> None:
        """Replaces :data:`CHECK` in ``names``, the globals of generated code, when the program is built."""
        self._callers.append(names)


CHECK = "check_objects"


def follow(names: dict[str, Any]) -> None:
    """Lets a check of :func:`object_check` among the globals of generated code be replaced later."""
    if isinstance(names.get(CHECK), UntilBuilt):
        names[CHECK].follow(names)


def _native_check(guards: list[Guard]) -> Callable[[], bool]:
    native = guards_module()
    if native is None:
        return _python_check(guards)
    native.let_through(signal_handlers.raised)
    if native.tensors_readable():
        return native.guard_program(instructions(guards, tensors_readable=True))  # type: ignore[no-any-return]
    tensors = [guard for guard in guards if guard.kind in _OF_TENSORS]
    objects = native.guard_program(instructions([guard for guard in guards if guard.kind not in _OF_TENSORS]))
    if not tensors:
        return objects  # type: ignore[no-any-return]
    check = _python_check(tensors)
    return lambda: objects() and check()


def _python_check(guards: list[Guard]) -> Callable[[], bool]:
    writer = Writer()
    tests = write_guards(writer, guards, miss="return False")
    lines = ["def check_objects():", "    try:", *(f"        {line}" for line in tests)]
    lines += ["        pass", *answering_errors("return False"), "    return True"]
    names = {
        **writer.names,
        **HANDLER_RAISED,
        "check_tensors": tensor_check(guards, lambda source: source.fetch((), {})),
    }
    return compile_function("check_objects", "\n".join(lines) + "\n", names, "<sidefx_train objects>")  # type: ignore[no-any-return]


def instructions(guards: list[Guard], tensors_readable: bool = False) -> tuple[tuple[Any, ...], ...]:
    """Returns the program; the C++ that reads it documents the format."""
    return _Assembler(guards, tensors_readable).run()


class _Assembler:
    """Compiles guards to instructions, parents before children; values that are read again get a register.

    Values read from one dict form a group behind a gate. If the dict is unchanged since the group last held, the gate
    skips the tests that depend on nothing else, which come first.
    """

    def __init__(self, guards: list[Guard], tensors_readable: bool) -> None:
        self.tensors_readable = tensors_readable
        self.code: list[tuple[Any, ...]] = []
        self.registers: dict[tuple[str, int], int] = {}
        self.tests: dict[int, list[Guard]] = {}
        self.children: dict[int, list[Source]] = {}
        self.roots: list[Source] = []
        self.needed: set[int] = set()
        self.pairs = [guard for guard in guards if guard.kind == "same"]
        self.relations = [guard for guard in guards if guard.kind in _RELATIONS]
        self.storage_sharing = [guard for guard in guards if guard.kind == "storage_sharing"]
        empty = {id(g.source) for g in guards if g.kind == "length" and g.value == 0}
        self.tensors = {id(guard.source.key): guard.source.key for guard in guards if guard.kind == "tensor"}
        self.hooks = self._tested_with_tensors(guards) if tensors_readable else {}
        folded = {id(guard) for held in self.hooks.values() for guard in held if guard is not None}
        for guard in guards:
            if guard.kind in _OF_TENSORS or id(guard) in folded:
                continue
            self._place(guard.source)
            if guard.kind in _RELATIONS:
                for source in KINDS[guard.kind].others(guard):
                    self._place(source)
                    self.needed.add(id(source))
            elif guard.kind == "same":
                self._place(guard.value)
                self.needed |= {id(guard.source), id(guard.value)}
            elif guard.kind == "absent":
                self.needed.add(id(guard.source))
                self.tests[id(guard.source)].append(guard)
            elif not (guard.kind == "type" and id(guard.source) in empty):
                self.tests[id(guard.source)].append(guard)  # an empty container is only tested for emptiness

    def _tested_with_tensors(self, guards: list[Guard]) -> dict[int, list[Guard | None]]:
        """Returns hook guards that are tested along with their tensor, by tensor: [hooks, post-accumulate hooks]."""
        used: list[int] = []
        for guard in guards:
            used.append(id(guard.source))
            for source in (guard.source, *KINDS[guard.kind].others(guard)):
                while source is not None and source.parent is not None:
                    source = source.parent
                    used.append(id(source))
        once = {key for key, count in Counter(used).items() if count == 1}
        found: dict[int, list[Guard | None]] = {}
        for guard in guards:
            tensor = self._tensor_of_hooks(guard.source)
            if guard.kind == "is" and id(guard.source) in once and id(tensor) in self.tensors:
                found.setdefault(id(tensor), [None, None])[list(_HOOKS).index(guard.source.key)] = guard
        return found

    def _tensor_of_hooks(self, source: Source) -> torch.Tensor | None:
        """Returns the held tensor if the source reads its hooks, else ``None``."""
        parent = source.parent
        held = parent is not None and parent.kind == "const" and issubclass(type(parent.key), torch.Tensor)
        if parent is None or not held or source.kind != "slot" or source.key not in _HOOKS:
            return None
        return parent.key if self.tensors_readable else None  # type: ignore[no-any-return]

    def _place(self, source: Source) -> None:
        if id(source) in self.tests:
            return
        self.tests[id(source)], self.children[id(source)] = [], []
        if source.parent is None:
            self.roots.append(source)
        else:
            self._place(source.parent)
            self.children[id(source.parent)].append(source)
            self.needed.add(id(source.parent))

    def run(self) -> tuple[tuple[Any, ...], ...]:
        for source in self.roots:
            assert source.kind == "const", f"{source} starts at an argument"
            self._tests(source, ("const", -1, source.key, None))
            self._below(source)
        for guard in self.pairs:
            first, second = (self._kept(source) for source in (guard.source, guard.value))
            self._emit(("register", first, None, None), "same", None, second)
        for guard in self.relations:
            kept = tuple(map(self._kept, KINDS[guard.kind].others(guard)))
            test, _, ones = _instruction(guard)
            self._emit(("const", -1, guard.kind, None), test, kept, ones)
        if self.tensors:
            self._emit(("tensors", -1, tuple(map(self._tensor, self.tensors.values())), None), "none", None)
        for guard in self.storage_sharing:  # after all tensors
            everywhere = all(id(tensor) in self.tensors for tensor in guard.value.tensors)
            number = 0 if everywhere else 1  # unless every tensor is tested, the guard itself reads all addresses
            self._emit(("const", -1, guard.source.key, None), "storage_sharing", guard.value.refresh, number)
        return tuple(self.code)

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        hooks = self.hooks.get(id(tensor), (None, None))
        return (tensor, *(... if guard is None else guard.value for guard in hooks))

    def _kept(self, source: Source) -> int:
        """Returns the register of a value; loads constants first."""
        key = ("value", id(source))
        if key not in self.registers:
            assert source.kind == "const", f"{source} has been read into a register"
            self._emit(("const", -1, source.key, None), "none", None, target=self._new(key))
        return self.registers[key]

    def _below(self, source: Source) -> None:
        """Emits the reads below a value, depth first."""
        children = self.children[id(source)]
        entries = [child for child in children if child.kind == "attr"]
        items = [child for child in children if child.kind == "item"]
        absent = [guard for guard in self.tests[id(source)] if guard.kind == "absent"]
        if entries or absent:
            self._group(self._space(source), entries, absent, "entry")
        if items:
            self._group(self._kept(source), items, [], "item")
        for child in children:
            if child.kind not in ("attr", "item"):
                self._tests(child, self._step(child))
        for child in children:
            self._below(child)

    def _group(self, register: int, sources: list[Source], absent: list[Guard], load: str) -> None:
        immediate: list[tuple[Source, Guard]] = []
        others: list[tuple[Source, list[Guard]]] = []
        for source in sources:
            tests = self.tests[id(source)]
            firm = [guard for guard in tests if _is_firm(guard)]
            rest = [guard for guard in tests if guard.kind != "absent" and guard not in firm]
            immediate += [(source, guard) for guard in firm]
            if rest or id(source) in self.needed or not tests:
                others.append((source, rest))
        if load == "item" and not others and self._are_first_items(immediate):
            self._emit(("register", register, None, None), "items", tuple(guard.value for _, guard in immediate))
            return
        at = len(self.code)
        self._emit(("gate", register, None, None), "none", None)
        for guard in absent:
            self._emit(("register", register, None, None), "absent", guard.value)
        for source, guard in immediate:
            self._emit((load, register, None, source.key), *_instruction(guard))
        skipped = len(self.code) - at - 1
        for source, rest in others:
            self._tests(source, (load, register, None, source.key), rest)
        whole = len(self.code) - at - 1
        self.code[at] = (LOADS.index("gate"), register, None, None, TESTS.index("none"), None, whole, skipped)

    def _are_first_items(self, tests: list[tuple[Source, Guard]]) -> bool:
        """Returns True if the tests compare the first items of a list or tuple by identity, without gaps."""
        sequence = tests[0][0].parent if tests else None
        if sequence is None:
            return False
        types = [guard.value for guard in self.tests[id(sequence)] if guard.kind == "type"]
        types += [type(sequence.key)] if sequence.kind == "const" else []
        return any(issubclass(cls, (list, tuple)) for cls in types) and all(
            guard.kind == "is" and type(source.key) is int and source.key == place
            for place, (source, guard) in enumerate(tests)
        )

    def _tests(self, source: Source, load: tuple[str, int, Any, Any], tests: list[Guard] | None = None) -> None:
        """Emits the read of a value and its tests (default: all its guards); keeps the value if it is read again."""
        if tests is None:
            tests = [guard for guard in self.tests[id(source)] if guard.kind != "absent"]
        kept = ("value", id(source))
        if source.kind == "const":
            for guard in tests:
                self._emit(load, *_instruction(guard))
            return
        target = self._new(kept) if id(source) in self.needed or len(tests) > 1 else -1
        test, operand, number = _instruction(tests[0]) if tests else ("none", None, -1)
        self._emit(load, test, operand, number, target)
        for guard in tests[1:]:
            self._emit(("register", self.registers[kept], None, None), *_instruction(guard))

    def _step(self, source: Source) -> tuple[str, int, Any, Any]:
        """Returns the load instruction of a value whose parent is neither a dict nor a sequence."""
        parent = source.parent
        assert parent is not None, f"{source.kind} source without a parent"
        load = source.kind
        if self._tensor_of_hooks(source) is not None:
            return _HOOKS[source.key], -1, parent.key, None
        if parent.kind == "const":
            return load, -1, parent.key, source.key
        return load, self._kept(parent), None, source.key

    def _space(self, source: Source) -> int:
        """Returns the register of the instance ``__dict__`` of a value."""
        key = ("space", id(source))
        if key not in self.registers:
            if source.kind == "const":
                load: tuple[str, int, Any, Any] = ("dict", -1, source.key, None)
            else:
                load = ("dict", self._kept(source), None, None)
            self._emit(load, "none", None, target=self._new(key))
        return self.registers[key]

    def _new(self, key: tuple[str, int]) -> int:
        self.registers[key] = len(self.registers)
        return self.registers[key]

    def _emit(
        self, load: tuple[str, int, Any, Any], test: str, operand: Any, number: int = -1, target: int = -1
    ) -> None:
        kind, register, base, key = load
        self.code.append((LOADS.index(kind), register, base, key, TESTS.index(test), operand, number, target))


def _is_firm(guard: Guard) -> bool:
    """Returns True if the test of an entry holds as long as the entry is the same object."""
    if guard.kind == "type":
        return not guard.value.__flags__ & HEAP_TYPE  # the class of other instances can be reassigned
    return guard.kind in ("is", "equal")


def _instruction(guard: Guard) -> Instruction:
    return KINDS[guard.kind].instruction(guard)
