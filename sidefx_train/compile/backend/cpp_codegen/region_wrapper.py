"""A graph split into regions: one subgraph per region class, and the C++ that calls them in order.

Every region class becomes a function like that of a whole graph, in a namespace of its own. The outer wrapper holds the
values in between: each is passed with ownership to the region that uses it last, which frees it when it is no longer
needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.passes.repeated_regions import Division, Region

_CALLER = """
static AtenTensorHandle sidefx_again(const RAIIAtenTensorHandle& held) {
    AtenTensorHandle made = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(held.get(), &made));
    return made;
}

// Calls a region. Its inputs: indices of values, ~index of those that are not used after it.
// Its outputs: indices of values, -1 for unused ones.
__attribute__((noinline)) static void sidefx_part(void (*part)(AtenTensorHandle*, AtenTensorHandle*),
                                                  RAIIAtenTensorHandle* values, const int* takes, int taken,
                                                  const int* gives, int given, AtenTensorHandle* room) {
    AtenTensorHandle* made = room + taken;
    for (int i = 0; i < taken; ++i)
        room[i] = takes[i] < 0 ? values[~takes[i]].release() : sidefx_again(values[takes[i]]);
    for (int i = 0; i < given; ++i) made[i] = nullptr;
    part(room, made);
    for (int i = 0; i < given; ++i) {
        RAIIAtenTensorHandle owned(made[i]);
        if (gives[i] >= 0) values[gives[i]] = RAIIAtenTensorHandle(owned.release());
    }
}

// Makes a value of consecutive elements of another one, a vector.
__attribute__((noinline, unused)) static void sidefx_window(RAIIAtenTensorHandle* values, int made, int vector,
                                                            int64_t first, int64_t count) {
    const int64_t stride = 1;
    AtenTensorHandle window = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(values[vector].get(), 1, &count, &stride, first, &window));
    values[made] = RAIIAtenTensorHandle(window);
}

void inductor_entry_impl(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {
    RAIIAtenTensorHandle values[@VALUES@];
    AtenTensorHandle room[@ROOM@];
    for (int i = 0; i < @INPUTS@; ++i) {
        values[i] = RAIIAtenTensorHandle(input_handles[i]);
        input_handles[i] = nullptr;
    }
@CALLS@
@RESULTS@
}
"""


def region_module(region: Region) -> fx.GraphModule:
    """Returns the graph of a region: from its inputs to a tuple of its outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(region.takes):
        copies[node] = graph.placeholder(f"a{i}")
        copies[node].meta["val"] = node.meta["val"]
    window = region.window
    part = None if window is None else graph.placeholder("window")
    if window is not None and part is not None:
        part.meta["val"] = window.example
    for node in region.items:
        if window is not None and node in window.picks:
            copies[node] = graph.call_function(node.target, (part, 0, window.place(node)))  # type: ignore[arg-type]
            copies[node].meta["val"] = node.meta["val"]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[region.items[i]] for i in region.gives))
    return compat.late_module({}, graph)


def join_wrappers(division: Division, graph: fx.Graph, wrappers: dict[int, str]) -> str:
    """Returns the source of ``inductor_entry_impl`` for the whole graph.

    Args:
        division: the regions of the graph.
        graph: the whole graph.
        wrappers: source of ``inductor_entry_impl`` of each region class.
    """
    include = re.compile(r"(?m)^[ \t]*#include <[^>\n]*>\n")
    included = dict.fromkeys(line.strip() for text in wrappers.values() for line in include.findall(text))
    spaces = [
        f"namespace part{kind} {{\n{include.sub('', text)}\n}}  // namespace part{kind}\n"
        for kind, text in wrappers.items()
    ]
    return "\n".join([*included, "", *spaces]) + _calls(division, graph)


def _calls(division: Division, graph: fx.Graph) -> str:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    results: Sequence[fx.Node | None] = next(iter(reversed(graph.nodes))).args[0]  # type: ignore[assignment]
    values = {node: i for i, node in enumerate(inputs)}
    last = {node: number for number, region in enumerate(division.regions) for node in region.takes}
    for number, region in enumerate(division.regions):
        if region.window is not None:
            last[region.window.vector] = max(number, last.get(region.window.vector, 0))
    last |= {node: len(division.regions) for node in results if node is not None}
    calls, windows = [], 0
    for number, (region, kind) in enumerate(zip(division.regions, division.classes, strict=True)):
        takes: list[Any] = [~values[node] if last[node] == number else values[node] for node in region.takes]
        if region.window is not None:
            window, made = region.window, f"@WINDOW@ + {windows}"
            windows += 1
            calls.append(f"    sidefx_window(values, {made}, {values[window.vector]}, {window.first}, {window.count});")
            takes.append(f"~({made})")
        gives = []
        for i in region.gives:
            node = region.items[i]
            if last.get(node, -1) > number:
                values[node] = len(values)
            gives.append(values.get(node, -1) if last.get(node, -1) > number else -1)
        tables = [f"    static const int {name}{number}[] = {{{', '.join(map(str, table)) or 0}}};"
                  for name, table in (("takes", takes), ("gives", gives))]  # fmt: skip
        calls += [
            *tables,
            f"    sidefx_part(part{kind}::inductor_entry_impl, values, takes{number}, {len(takes)}, "
            f"gives{number}, {len(gives)}, room);",
        ]
    final = {node: i for i, node in enumerate(results)}
    lines = []
    for i, node in enumerate(results):
        if node is None:
            lines.append(f"    output_handles[{i}] = nullptr;")
        elif final[node] == i:
            lines.append(f"    output_handles[{i}] = values[{values[node]}].release();")
        else:
            lines.append(f"    output_handles[{i}] = sidefx_again(values[{values[node]}]);")
    room = max(len(region.takes) + 1 + len(region.gives) for region in division.regions)
    filled = {"VALUES": len(values) + windows, "ROOM": room, "INPUTS": len(inputs), "WINDOW": len(values)}
    text = _CALLER.replace("@CALLS@", "\n".join(calls)).replace("@RESULTS@", "\n".join(lines))
    for name, number in filled.items():
        text = text.replace(f"@{name}@", str(number))
    return text


def regions_note(division: Division, graph: fx.Graph) -> str:
    """Returns the note for the report."""
    kinds = set(division.classes)
    lowered = sum(len(division.regions[kind].items) for kind in kinds)
    total = sum(node.op == "call_function" for node in graph.nodes)
    return f"{len(division.regions)} regions of {len(kinds)} classes: {lowered} operations lowered in place of {total}"


def example_values(region: Region) -> list[compat.FakeTensor]:
    """Returns the fake inputs for which a region is lowered."""
    window = [] if region.window is None else [region.window.example]
    return [node.meta["val"] for node in region.takes] + window  # type: ignore[return-value]
