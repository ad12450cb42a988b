"""Collects an entry's guards at the end of a capture: guards, number conditions, distinct-identity guards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard, NumberCondition
from sidefx_train.compile.capture.guards.native_check import follow, object_check, split
from sidefx_train.compile.capture.guards.python_check import (
    HANDLER_RAISED,
    answering_errors,
    tensor_check,
    write_guards,
)
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.guards.storage_guards import StorageSharing
from sidefx_train.compile.capture.guards.symbol_guards import number_conditions, size_conditions
from sidefx_train.compile.capture.shadows.containers.instance_dicts import InstanceDictRecord
from sidefx_train.compile.capture.shadows.containers.iterators import IteratorRecord
from sidefx_train.compile.capture.shadows.containers.known_iterators import KnownRecord
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.containers.sets import SetRecord
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record, TensorRecord
from sidefx_train.compile.capture.side_effects.effect import SideEffects
from sidefx_train.compile.capture.world.trace_world import TraceWorld
from sidefx_train.compile.common.generated_code import compile_function
from sidefx_train.compile.common.source_literals import literal
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.pipeline.captured import StopGuard
from sidefx_train.compile.pipeline.entry import first_failure
from sidefx_train.compile.residual.input_metadata import input_facts
from sidefx_train.errors import Location


def symbols(world: TraceWorld) -> tuple[dict[str, Source], list[NumberCondition]]:
    """Returns the source of each symbol of the capture, and conditions that equate sizes of inputs with symbols."""
    sources: dict[str, Source] = {
        str(compat.symbol_of_input(number)): source for number, source, _ in world.heap.numbers.inputs
    }
    return sources, size_conditions(world.heap.sizes, sources)


def _decided_numbers(world: TraceWorld) -> list[Guard]:
    """Returns the conditions on numbers that a capture which stopped has decided."""
    sources, conditions = symbols(world)
    values = {str(compat.symbol_of_input(number)): real for number, _, real in world.heap.numbers.inputs}
    conditions += number_conditions(compat.recorded_conditions(world.tracer.shape_env), sources, values)[0]
    return [Guard("number", condition.names[0][1], condition) for condition in conditions]


def all_guards(world: TraceWorld) -> list[Guard]:
    """Returns every guard of a capture, each with the line that caused it."""
    sources, conditions = symbols(world)
    values = {str(compat.symbol_of_input(number)): real for number, _, real in world.heap.numbers.inputs}
    recorded, others = number_conditions(compat.recorded_conditions(world.tracer.shape_env), sources, values)
    conditions += recorded
    if others:
        world.heap.refuse("SFX101", f"specialized a value that exists only when the graph runs: {others[0]}")
    guards = world.heap.aliased.marked(list(world.heap.guards.values()))
    guards += [Guard("number", condition.names[0][1], condition) for condition in conditions]
    guards += [*world.heap.identities.separated(), *_separate_tensors(world), *world.heap.definitions.guards()]
    guards += world.queries.guards()
    return _located(guards, world.defined_at)


def _located(guards: list[Guard], defined_at: Location | None) -> list[Guard]:
    """Gives guards without a line of their own the first line that read the value or its holder."""
    read_at: dict[int, Location | None] = {}
    for guard in guards:
        if guard.location is not None:
            read_at.setdefault(id(guard.source), guard.location)

    def place(source: Source | None) -> Location | None:
        while source is not None and id(source) not in read_at:
            source = source.parent
        return read_at[id(source)] if source is not None else defined_at

    return [guard if guard.location else replace(guard, location=place(guard.source)) for guard in guards]


def _storage_sharing(world: TraceWorld, tensors: list[torch.Tensor], written: list[torch.Tensor]) -> StorageSharing:
    """Returns one object for the same tensors: the residual compares with addresses that guards update."""
    key = (tuple(map(id, tensors)), tuple(map(id, written)))
    return world.heap.memories.setdefault(key, StorageSharing(tensors, written))


def _separate_tensors(world: TraceWorld) -> list[Guard]:
    """Returns no-overlap guards: a tensor fetched at every call must not share storage with one that the step writes,
    nor a written one with any that the entry holds. Tensors that are to be kept apart are treated like written ones."""
    fetched = [r for r in world.heap.by_real.values() if isinstance(r, TensorRecord) and r.kind == "tensor"]
    reals = _written(world)
    written = [record for record in fetched if id(record.real) in reals]
    guards: list[Guard] = []
    for record in written:
        for other in fetched:
            if other is record or (other in written and id(other) < id(record)):
                continue
            if compat.storage_address(record.real) != compat.storage_address(other.real):
                guards.append(Guard("no_shared_storage", record.source, other.source))
            else:
                guards.append(_placed(record, other))
    held = [r for r in world.heap.by_real.values() if isinstance(r, TensorRecord) and r.kind == "static"]
    changed = [record.real for record in held if id(record.real) in reals]
    memory = _storage_sharing(world, [record.real for record in held], changed)
    if len(held) > 1 and changed:
        guards.append(Guard("storage_sharing", Source("const", None, memory, "held tensors"), memory))
    for record in fetched:
        known, address = memory, compat.storage_address(record.real)
        if address in memory.every:  # it shares storage with a held one
            others = [other.real for other in held if compat.storage_address(other.real) != address]
            known = _storage_sharing(world, others, changed)
            if others:
                guards.append(Guard("storage_sharing", Source("const", None, known, "other held tensors"), known))
        disjoint = known.every if record in written else known.changed
        if disjoint:
            guards.append(Guard("no_overlap", record.source, disjoint))
        for other in held:
            matters = record in written or id(other.real) in reals
            if matters and compat.storage_address(other.real) == address:
                guards.append(_placed(record, other))
    return [*guards, *_counters_shared(fetched, held), *_offsets(world, fetched)]


def changed_sources(world: TraceWorld, effects: SideEffects) -> set[int]:
    """Returns ids of the sources of all objects, and of all tensors, that the step changes."""
    written = _written(world)
    tensors = {id(record.source) for record in world.heap.by_real.values() if id(record.real) in written}
    return tensors | {id(effect.target) for effect in effects.changes}


def _written(world: TraceWorld) -> set[int]:
    """Returns ids of the outside tensors that the step writes, and of those that are to be treated so."""
    changing = {facts.position for facts in input_facts(world) if facts.mutates_data or facts.mutates_metadata}
    return {id(world.tracer.real_inputs[position]) for position in changing} | world.kept_apart


def _counters_shared(fetched: list[TensorRecord], held: list[TensorRecord]) -> list[Guard]:
    """Returns guards that tensors in one storage still share version counters, or not: errors in a backward depend on
    it."""
    found: list[Guard] = []
    known: dict[int, list[TensorRecord]] = {}
    for record in held:
        known.setdefault(compat.storage_address(record.real), []).append(record)
    for record in fetched:
        others = known.setdefault(compat.storage_address(record.real), [])
        if not record.real.is_inference():
            for other in others:
                shared = compat.share_version_counter(record.real, other.real)
                found.append(Guard("version_counter", record.source, (other.source, shared)))
        others.append(record)
    return found


def _placed(record: TensorRecord, other: TensorRecord) -> Guard:
    return Guard("same_storage_offset", record.source, (other.source, other.real.data_ptr() - record.real.data_ptr()))


def _offsets(world: TraceWorld, fetched: list[TensorRecord]) -> list[Guard]:
    """Returns storage offset guards: ``as_strided`` of a tensor's memory is recorded with an offset in the storage."""
    addresses, sources = _viewed_by_offset(world), world.heap.sources
    return [
        Guard("equal", sources.call(sources.slot(record.source, "storage_offset")), record.real.storage_offset())
        for record in fetched
        if compat.storage_address(record.real) in addresses
    ]


def _viewed_by_offset(world: TraceWorld) -> set[int]:
    """Returns the addresses of the storages of inputs of which the graph makes views by their offset."""
    tracer = world.tracer
    viewed = [node for node in tracer.graph.nodes if "as_strided" in str(node.target)]
    if not viewed:
        return set()
    real = dict(zip(tracer.placeholders, tracer.real_inputs, strict=True))
    roots = frozenset(real)
    if not any("set_." in str(node.target) for node in tracer.graph.nodes):  # it gives a tensor another's memory
        aliases = Aliases(tracer.graph)
        roots = frozenset().union(*(aliases.roots[node] for node in viewed))
    found = [real[root] for root in roots if root in real]
    return {compat.storage_address(value) for value in found if isinstance(value, torch.Tensor)}


def separate_objects(world: TraceWorld, effects: SideEffects) -> list[Guard]:
    """Returns guards that objects found by path stay distinct if the step changes one of them."""
    reached = [
        record
        for record in world.heap.by_real.values()
        if isinstance(record, (ListRecord, DictRecord, SetRecord, InstanceRecord)) and record.base.kind != "const"
    ]
    targets = {id(effect.target) for effect in effects.changes}
    found: list[Guard] = []
    for cls in {type(record.real) for record in reached if id(record.base) in targets}:
        same_type = tuple(record.base for record in reached if type(record.real) is cls)
        if len(same_type) > 1:
            found.append(Guard("all_distinct", same_type[0], same_type))
    found += [*_distinct_iterators(world), *_distinct_namespaces(world, targets)]
    _separate_iterated(world, targets)
    return [*found, *_distinct_from_namespaces(world, [r for r in reached if type(r.real) is dict], targets)]


def _distinct_iterators(world: TraceWorld) -> list[Guard]:
    """Returns guards that the iterators which the step reads stay distinct if it advances one of them."""
    kinds: dict[type, list[IteratorRecord]] = {}
    for record in world.heap.by_real.values():
        if isinstance(record, IteratorRecord):
            kinds.setdefault(type(record.real), []).append(record)
    sources = [
        tuple(record.source for record in records)
        for records in kinds.values()
        if len(records) > 1 and any(record.taken() != 0 for record in records)
    ]
    return [Guard("all_distinct", same_type[0], same_type) for same_type in sources]


def _separate_iterated(world: TraceWorld, targets: set[int]) -> None:
    """Guards that the iterators whose items the prologue finds run over no list that the step changes."""
    records = world.heap.by_real.values()
    changed = tuple(r.base for r in records if isinstance(r, ListRecord) and id(r.base) in targets)
    for record in list(records):
        if changed and isinstance(record, KnownRecord):
            record.guard_apart(changed)


def _distinct_namespaces(world: TraceWorld, targets: set[int]) -> list[Guard]:
    """Returns guards that instances of a class do not share a ``__dict__`` that the step changes."""
    spaces: dict[type, list[InstanceDictRecord]] = {}
    for record in world.heap.by_real.values():
        if isinstance(record, InstanceDictRecord):
            spaces.setdefault(type(record.owner.real), []).append(record)
    same_type = [
        tuple(record.source for record in records)
        for records in spaces.values()
        if len(records) > 1 and any(id(record.owner.base) in targets for record in records)
    ]
    return [Guard("all_distinct", sources[0], sources) for sources in same_type]


def _distinct_from_namespaces(world: TraceWorld, dicts: list[Record], targets: set[int]) -> list[Guard]:
    """Returns guards that a dict is not the ``__dict__`` of an instance if the step changes one of the two."""
    if not dicts:
        return []
    written = any(id(record.base) in targets for record in dicts)
    spaces = [
        record.source
        for record in world.heap.by_real.values()
        if isinstance(record, InstanceDictRecord) and (written or id(record.owner.base) in targets)
    ]
    bases = tuple(record.base for record in dicts)
    return [Guard("disjoint_sets", spaces[0], (tuple(spaces), bases))] if spaces else []


def stop_guard(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StopGuard | None:
    """Returns generated code that is true while a capture would stop at the same location."""
    guards = [*world.heap.guards.values(), *world.heap.identities.separated(), *world.heap.definitions.guards()]
    guards += world.queries.guards()
    if first_failure(tuple(guards), args, kwargs) is not None:
        return None
    conditions = _decided_numbers(world)
    if first_failure(tuple(conditions), args, kwargs) is None:  # they need not be met: the stop may have come before
        guards += conditions
    every = tuple(guards)
    writer = Writer()
    held, guards = split(guards)
    names = tuple(kwargs)
    keywords = literal(names) or writer.constant(names, "keywords")
    tests = [f"if len(args) != {len(args)} or tuple(kwargs) != {keywords}: return False"]
    tests += ["if not check_objects(): return False", *write_guards(writer, guards, miss="return False")]
    lines = ["def holds(args, kwargs):", "    try:", *(f"        {line}" for line in tests)]
    lines += [*answering_errors("return False"), "    return True"]
    check = tensor_check(guards, lambda source: source.fetch(args, kwargs))
    space = {**writer.names, **HANDLER_RAISED, "check_tensors": check, "check_objects": object_check(held)}
    holds = compile_function("holds", "\n".join(lines) + "\n", space, "<sidefx_train stop guard>")
    follow(space)
    return StopGuard(holds, every)
