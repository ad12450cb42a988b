"""Generates the residual of a step: a function that checks guards, fetches, runs the graph, and applies the effects."""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.kinds.objects import cell_is_set
from sidefx_train.compile.capture.guards.native_check import follow, split
from sidefx_train.compile.capture.guards.python_check import HANDLER_RAISED, answering_errors, write_guards
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.shadows.objects.wrapper_tensors import WrapperRecord
from sidefx_train.compile.capture.shadows.records import Record, TensorRecord
from sidefx_train.compile.capture.side_effects.collect import gets_new_history, history_regenerated
from sidefx_train.compile.capture.side_effects.effect import Effect, SideEffects
from sidefx_train.compile.common.generated_code import compile_function
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.source_literals import literal
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.step_metadata import StepMetadata
from sidefx_train.compile.residual.effect_lines import GradientLine, effect_lines, gradients_at_once, switch_line
from sidefx_train.compile.residual.native_functions import PlannedFunction
from sidefx_train.compile.residual.reconstruct import custom_functions
from sidefx_train.compile.residual.reconstruct.deferred import write_call
from sidefx_train.compile.residual.reconstruct.rebuilder import Rebuilder
from sidefx_train.compile.residual.saved_tensor_refs import Seen
from sidefx_train.compile.residual.view_replay import CustomView, IntermediateView, KnownOutputs
from sidefx_train.compile.residual.wrapper_outputs import Shells

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


MISS: Any = type("Miss", (), {"__repr__": lambda self: "<miss>"})()
"""Result of a generated function if a guard fails; nothing has been changed then."""


@dataclass(frozen=True)
class Residual:
    """Generated source of a step, before the graph is compiled.

    Attributes:
        source: the function ``replay(args, kwargs)``.
        guard_source: the function ``fetch(args, kwargs)``: guards and prologue only, for timing.
        names: constants that the source refers to.
        outputs: graph nodes that ``run`` must return, in order.
        metadata: facts of inputs and outputs.
        differentiable: differentiable outputs, by position.
        updates: those of them that are new values of inputs -> the inputs' positions.
        customs: those of them that are views of inputs made by custom functions.
        counters: nodes of ``.data`` whose version counters some output has.
        views: views that their backward passes through; ``run`` returns them after the outputs, last first.
        seen: records the other views that the source makes, if a backward leaves the step too.
        shown: those views, by their nodes.
        histories: the tensors with an autograd history that leave the step.
        shells: wrapper subclasses with a history that leave the step.
        natives: calls of custom functions whose own backward runs outside, with the positions of the values they save.
        made: ids of objects created in the step that leave it.
        positional: number of positional arguments.
        keywords: names of keyword arguments, in call order.
        gradients: (label of a tensor, position of the output that becomes its gradient, and nothing else).
    """

    source: str
    guard_source: str
    names: dict[str, Any]
    outputs: tuple[fx.Node, ...]
    metadata: StepMetadata
    differentiable: dict[int, Any]
    updates: dict[int, int]
    customs: dict[int, CustomView]
    counters: frozenset[fx.Node]
    views: tuple[IntermediateView, ...]
    seen: Seen
    shown: dict[fx.Node, int]
    histories: tuple[Any, ...]
    shells: Shells
    natives: tuple[PlannedFunction, ...]
    made: frozenset[int]
    positional: int
    keywords: tuple[str, ...]
    gradients: tuple[tuple[str, int], ...] = ()

    @property
    def differentiates(self) -> bool:
        """Returns True if autograd outside may differentiate a result."""
        return bool(self.metadata.tangents or self.shells.values)

    def without_trace(self) -> Residual:
        """Returns what a call needs: not the tensors of the trace, whose autograd graph holds the hooks of the program.

        Python's collector cannot follow such a graph: an entry that kept it would keep the program's objects for good.
        """
        self.shells.values.clear()
        return replace(self, differentiable={}, customs={}, histories=(), views=(), natives=())


def outside_wrappers(world: TraceWorld) -> list[WrapperRecord]:
    """Returns the wrapper subclasses from outside, which a joint graph gets after its other inputs."""
    records = [each for each in world.heap.by_real.values() if safe_isinstance(each, WrapperRecord)]
    return [each for each in records if not compat.is_jagged(each.real)]


def plan(
    world: TraceWorld,
    name: str,
    guards: list[Guard],
    effects: SideEffects,
    returned: Any,
    positional: int,
    keywords: tuple[str, ...],
    suspended: bool = False,
) -> Residual:
    """Generates the residual.

    Args:
        world: the world of the capture.
        name: the step's name, for the header.
        guards: conditions on the state at entry.
        effects: changes after the graph.
        returned: the step's return value, as a value of the trace.
        positional: number of positional arguments.
        keywords: names of keyword arguments, in call order.
        suspended: ``returned`` is the state of suspended frames, which ``proceed`` continues.
    """
    known_outputs = KnownOutputs()
    while True:  # which outputs leave together is known only after everything has been written
        given = _Generation(world, name, effects, known_outputs)
        residual = given.residual(guards, returned, positional, keywords, suspended)
        known = given.rebuilder.found_outputs()
        if known.known() == known_outputs.known():
            return residual
        known_outputs = known


class _Generation:
    """The source of a residual for known outputs.

    Attributes:
        world: the world of the capture.
        name: the step's name, for the header.
        effects: changes after the graph.
        known_outputs: what an earlier generation found about the outputs.
        writer: expressions of what guards and inputs read.
        rebuilder: lines that rebuild results, after the graph.
    """

    def __init__(self, world: TraceWorld, name: str, effects: SideEffects, known_outputs: KnownOutputs) -> None:
        self.world, self.name, self.effects, self.known_outputs = world, name, effects, known_outputs
        self.writer = Writer()
        self.rebuilder = Rebuilder(world, self.writer, known_outputs)
        self.rebuilder.apply = self._apply
        self._written: dict[int, list[str]] = {}

    def residual(
        self, guards: list[Guard], returned: Any, positional: int, keywords: tuple[str, ...], suspended: bool
    ) -> Residual:
        """Generates the residual; arguments as of :func:`plan`."""
        world, rebuilder = self.world, self.rebuilder
        tests = self._tests(guards, positional, keywords)
        inputs = _inputs(world, self.writer)
        self._replay_history()
        epilogue = self._epilogue(returned, suspended)
        wrappers: list[str] = []
        if rebuilder.differentiable or rebuilder.shells.values:
            wrappers = [self.writer.value(record.source) for record in outside_wrappers(world)]
        tests += self.writer.fetched
        off = self.writer.constant(compat.subclasses_off) if world.heap.shown.any else ""
        source = _render(self.name, tests, inputs + wrappers, gradients_at_once(self.writer, epilogue), off)
        guard_source = _render(self.name, tests, inputs, None, off)
        if any(map(_belongs_to_trace, self.writer.names.values())):
            world.heap.refuse("SFX104", "cannot rebuild an object that holds a tensor, or a callback, of the step")
        rebuilder.settle()
        outputs, views = tuple(rebuilder.outputs), tuple(rebuilder.live)
        metadata, values = rebuilder.metadata(), rebuilder.differentiable
        counters = rebuilder.views.counted()
        return Residual(
            source,
            guard_source,
            self.writer.names,
            outputs,
            metadata,
            values,
            rebuilder.updates,
            rebuilder.customs,
            counters,
            views,
            rebuilder.seen,
            rebuilder.shown,
            (*rebuilder.histories(), *rebuilder.shells.values),
            rebuilder.shells,
            custom_functions.planned(rebuilder),
            rebuilder.made(),
            positional,
            keywords,
            _gradients(self.effects.changes, self._written, epilogue),
        )

    def _tests(self, guards: list[Guard], positional: int, keywords: tuple[str, ...]) -> list[str]:
        """Returns the lines that return ``MISS`` where a guard fails."""
        tests = [f"if len(args) != {positional}: return MISS"]
        if keywords:
            names = literal(keywords) or self.writer.constant(keywords, "keywords")
            tests.append(f"if tuple(kwargs) != {names}: return MISS")
        else:
            tests.append("if kwargs: return MISS")
        tests.append("if not check_state(): return MISS")
        held, others = split(guards)
        if held:
            tests.append(f"if not check_objects(): return MISS  # {len(held)} guards on objects of this entry")
        return tests + write_guards(self.writer, others)

    def _replay_history(self) -> None:
        """Writes what gives inputs their autograd history, and memory of its own to what needs it."""
        world, rebuilder, changes = self.world, self.rebuilder, self.effects.changes
        rebuilder.replace_storages(changes)
        rebuilder.lines += [switch_line(self.writer, each) for each in changes if each.switches]
        records = [each for each in world.heap.by_real.values() if safe_isinstance(each, TensorRecord)]
        for record in records:
            if gets_new_history(world, record):
                rebuilder.update(record)
        following = [record for record in records if history_regenerated(world, record)]
        made: list[tuple[tuple[int, int], Callable[[Any], object], Any]]
        made = [(rebuilder.begins(record), rebuilder.follow, record) for record in following]
        made += [(begun, rebuilder.prepared, view) for begun, view in self.known_outputs.replayed]
        for _, make, each in sorted(made, key=lambda item: item[0]):  # the engine runs them in reverse
            make(each)

    def _epilogue(self, returned: Any, suspended: bool) -> list[str]:
        """Returns the lines after the graph: results, effects, deferred calls."""
        rebuilder, effects = self.rebuilder, self.effects
        for function in reversed(self.world.custom_functions.native):
            custom_functions.write_node(rebuilder, function)
        for call in effects.calls:
            if call.result is not None:
                write_call(rebuilder, call)
        for effect in effects.changes:
            self._write(effect)
        result = rebuilder.expression(returned)
        changes = [line for effect in effects.changes for line in self._written[id(effect)]]
        # Calls with unused results (print, log) come last: then everything they read has the step's values.
        built = len(rebuilder.lines)
        for call in effects.calls:
            if call.result is None:
                write_call(rebuilder, call)
        epilogue = [*rebuilder.entry_aliases(), *rebuilder.lines[:built], *changes, *rebuilder.lines[built:]]
        return [*epilogue, f"return proceed({result})" if suspended else f"return {result}"]

    def _write(self, effect: Effect) -> None:
        if id(effect) not in self._written:
            self._written[id(effect)] = []  # while it is being written
            self._written[id(effect)] = effect_lines(self.writer, self.rebuilder, effect)

    def _apply(self, record: Record) -> None:
        """Writes the effects on an object at once: what is rebuilt next reads it."""
        for effect in self.effects.changes:
            if effect.target in (record.source, record.base):
                self._write(effect)
                self.rebuilder.lines += self._written[id(effect)]
                self._written[id(effect)] = []


def _gradients(
    changes: Iterable[Effect], written: dict[int, list[str]], epilogue: list[str]
) -> tuple[tuple[str, int], ...]:
    """Returns the outputs that the epilogue only assigns to the gradient of a tensor."""
    uses = Counter(re.findall(r"\bo\[(\d+)\]", "\n".join(epilogue)))
    found = []
    for effect in changes:
        lines = written[id(effect)]
        line = lines[0] if len(lines) == 1 else None
        if isinstance(line, GradientLine) and line.position is not None and uses[str(line.position)] == 1:
            found.append((effect.target.label, line.position))
    return tuple(found)


def _belongs_to_trace(value: Any) -> bool:
    """Returns True for what only exists during a trace, or holds that: generated code must not return it.

    That is a fake tensor, and a callback that was passed to native code in place of a function of the step.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return any(map(_is_shadow, value))
    if kind is types.FunctionType and value.__closure__:
        cells = [ABSENT if not cell_is_set(cell) else cell.cell_contents for cell in value.__closure__]
        return any(_is_shadow(item) or _is_callback(item) for item in cells)
    return _is_shadow(value)


def _is_shadow(value: Any) -> bool:
    """Returns True for a fake tensor, and for a tensor subclass over fake tensors."""
    if compat.is_wrapper(value):
        return any(map(_is_shadow, vars(value).values()))
    return type(value) is compat.FakeTensor


def _is_callback(value: Any) -> bool:
    return type(value) is types.FunctionType and "leads_to" in vars(value)


def link(residual: Residual, name: str, bindings: dict[str, Any], measuring: bool = False) -> Any:
    """Compiles the generated source.

    Args:
        residual: the plan.
        name: shown in tracebacks.
        bindings: ``run``, ``failed``, ``check_objects``, ``check_tensors`` and ``check_state``.
        measuring: compile the guards-only function instead.
    """
    names = {**residual.names, **HANDLER_RAISED, "MISS": MISS, **bindings}
    source = residual.guard_source if measuring else residual.source
    replay = compile_function("replay", source, names, f"<sidefx_train {name}>")
    follow(names)
    return replay


def _inputs(world: TraceWorld, writer: Writer) -> list[str]:
    """Returns expressions of the graph's inputs; consecutive static ones are one tuple that the entry holds."""
    found: list[str] = []
    static: list[Any] = []

    def close() -> None:
        if static:
            found.append(f"*{writer.constant(tuple(static), 'static')}")
            static.clear()

    for index, (item, real) in enumerate(zip(world.tracer.inputs, world.tracer.real_inputs, strict=True)):
        if item.kind == "static":
            static.append(real)
        else:
            close()
            found.append(_input(world, writer, index))
    close()
    return found


def _input(world: TraceWorld, writer: Writer, index: int) -> str:
    item = world.tracer.inputs[index]
    real = world.tracer.real_inputs[index]
    if item.kind == "scalar":
        for number, source, _ in world.heap.numbers.inputs:
            if number is item.example:
                return writer.value(source)
        raise AssertionError(f"no source for the number {item.source}")
    record = world.heap.by_real.get(id(real))
    assert record is not None, f"no record for the input {item.source}"
    return writer.value(record.source)


_OF_STATE = 3
"""Tests that come first: those of the number of arguments, and of torch's global state."""


def _under(context: str, lines: list[str]) -> list[str]:
    """Returns lines inside a ``with``; the lines themselves if ``context`` is empty."""
    return [f"with {context}():", *(f"    {line}" for line in lines)] if context else lines


def _render(name: str, tests: list[str], inputs: list[str], epilogue: list[str] | None, off: str) -> str:
    """Returns the source.

    Args:
        name: the step's.
        tests: lines that fetch values and test guards.
        inputs: of the graph.
        epilogue: lines after it; ``None`` for the guards alone.
        off: the context in which torch calls no ``__torch_function__``; empty if no tensor has one.
    """
    lines = [f"# Generated by sidefx_train for {name}: guards, prologue, graph, epilogue."]
    lines += ["def replay(args, kwargs):", "    try:"]
    lines += [f"        {line}" for line in [*tests[:_OF_STATE], *_under(off, tests[_OF_STATE:])]]
    lines += answering_errors("return MISS")
    call = ", ".join(inputs)
    if epilogue is None:
        lines.append(f"    return [{call}]")
        return "\n".join(lines) + "\n"
    lines += ["    stopped = None", "    try:", *(f"        {line}" for line in _under(off, [f"o = run([{call}])"]))]
    lines += ["    except Exception as error:", "        stopped = error"]
    lines.append("    if stopped is not None:")
    fetched = [found[1] for line in tests if (found := re.match(r"(\w+) = ", line))]
    if fetched:  # keep nothing alive that the eager step, run instead, may drop
        lines.append(f"        {' = '.join(dict.fromkeys(fetched))} = None")
    lines.append("        return failed(stopped, args, kwargs)")
    if off:
        *epilogue, last = epilogue
        proceeds = last.startswith("return proceed(")  # that runs the program's own code
        result = last.removeprefix("return proceed(").removesuffix(")") if proceeds else last.removeprefix("return ")
        epilogue = _under(off, [*epilogue, f"result = {result}"])
        epilogue.append("return proceed(result)" if proceeds else "return result")
    lines += [f"    {line}" for line in epilogue]
    return "\n".join(lines) + "\n"
