"""Speeds up Inductor's code generation without changing its result.

Each change has a name in ``sidefx_train/switches.py``. The tests compare generated code with and without each of them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

from sidefx_train.switches import enabled
from sidefx_train.torch_compat.inductor.patching import replaced

_CPU = torch.device("cpu")


@contextmanager
def without_idle_patterns(module: fx.GraphModule) -> Iterator[None]:
    """Context in which Inductor's joint-graph passes skip the attention patterns, which take long to create, and others
    that cannot match in a graph.

    The next pass outside this context creates them as usual.
    """
    from torch._inductor.fx_passes import joint_graph, misc_patterns, pad_mm
    from torch._inductor.pattern_matcher import init_once_fakemode

    makers = [getattr(pad_mm, "_pad_mm_init", None), getattr(misc_patterns, "_misc_patterns_init", None)]
    values = [node.meta.get("val") for node in module.graph.nodes]
    pads = any(getattr(value, "device", _CPU) != _CPU for value in values)  # products, not all on the CPU
    permutes = any("randperm" in str(node.target) for node in module.graph.nodes)  # indexing by a permutation

    def make_others(input_device: torch.device | None = None) -> None:
        for make, wanted in zip(makers, (pads, permutes), strict=True):
            if make is None or not wanted:
                continue
            make(input_device) if "input_device" in inspect.signature(make).parameters else make()

    if not all(makers):  # this torch names them differently: all are created
        yield
        return
    with replaced(joint_graph, "lazy_init", lambda _: init_once_fakemode(make_others)):
        yield


def _running_bodies(before: Callable[..., Any]) -> Callable[..., Any]:
    """Runs loop bodies, graphs of method calls on one object, without support for what other graphs may contain."""
    from torch._inductor.virtualized import V

    def run(shim: Any, *args: Any, **more: Any) -> Any:
        if more:
            return before(shim, *args, **more)
        values: dict[fx.Node, Any] = {}
        shim.env, given = values, iter(args)

        def value(arg: Any) -> Any:
            if type(arg) is fx.Node:
                return values[arg]
            return fx.map_arg(arg, values.__getitem__) if isinstance(arg, (tuple, list, dict, slice)) else arg

        with V.set_interpreter_handler(shim):
            for node in shim.graph.nodes:
                shim.current_node = node
                if node.op == "call_method":
                    called, *rest = map(value, node.args)
                    function = getattr(called, node.target)
                elif node.op == "call_module":
                    function, rest = shim.fetch_attr(node.target), list(map(value, node.args))
                elif node.op == "placeholder":
                    values[node] = next(given)
                    continue
                elif node.op == "output":
                    return value(node.args[0])
                else:
                    values[node] = shim.run_node(node)
                    continue
                values[node] = function(*rest, **{name: value(arg) for name, arg in node.kwargs.items()})
        raise AssertionError("a body of a loop without an output")

    return run


class _NoBounds:
    """Replaces bounds of values that are not indices."""

    @staticmethod
    def get_bounds() -> dict[Any, Any]:
        return {}


@contextmanager
def quick_codegen() -> Iterator[None]:
    """Context in which Inductor's C++ code generation computes repeated results once."""
    with ExitStack() as stack:
        for name, changes in _CODEGEN.items():
            if enabled(name):
                for place, attribute, make in changes():
                    stack.enter_context(replaced(place, attribute, make))
        yield


Changes = list[tuple[Any, str, Callable[[Any], Any]]]
"""Replacements: object, attribute, and function from the old to the new value."""


def _linear_strides() -> Changes:
    """Reads strides of indices that are linear in a variable, also within vectors, without simplification."""
    from torch._inductor.codegen import cpp

    def quick(before: Callable[..., Any]) -> Callable[..., Any]:
        def stride(index: Any, var: Any, vec_length: int | None = None) -> Any:
            step = linear_step(index, var)
            if step is None and vec_length:
                step = linear_step(within_vector(index, var, vec_length), var)
            return before(index, var, vec_length) if step is None else step

        return functools.cache(stride)

    return [(cpp, "stride_at_vec_range", quick)]


def _shared_dtype_rules() -> Changes:
    """Shares the dtype rules, one object anyway, instead of filling them in for each operation."""
    from torch._inductor.codegen import common

    return [(common, "DtypePropagationOpsHandler", functools.cache)]


def _skip_empty_tails() -> Changes:
    """Omits remainder loops of sizes that vectors divide, since there is no remainder.

    A kernel over two vectorized dimensions has two remainders. The lines after its loops, which store the results of
    reductions, are in the outer loop: they are needed while the outer remainder is not empty, whatever the inner one
    is.
    """
    from torch._inductor import scheduler
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    def marking(before: Callable[..., Any]) -> Callable[..., Any]:
        def new_kernel(group: Any, cls: Any, *args: Any) -> Any:
            kernel = before(group, cls, *args)
            kernel.sidefx_empty = issubclass(cls, cpp.CppVecKernel) and _is_empty(*args[2:])
            return kernel

        return new_kernel

    def unless_empty(before: Callable[..., Any]) -> Callable[..., Any]:
        def codegen(node: Any, index_vars: Any) -> None:
            if not getattr(V.kernel, "sidefx_empty", False):
                before(node, index_vars)

        return codegen

    group = getattr(cpp, "KernelGroup", None)
    return [(group, "new_kernel", marking), (scheduler.SchedulerNode, "codegen", unless_empty)]


def _is_empty(inner: Any = None, outer: Any = None) -> bool:
    """Returns True if no iteration of a kernel ever runs: sizes of its remainders; ``None`` if it has none."""
    if outer is not None:
        return bool(outer == 0)
    return bool(inner is not None and inner == 0)


def _skip_bounds() -> Changes:
    """Computes bounds of values only if some of them are indices."""
    from torch._inductor import loop_body
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    def unless_looked_up(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)  # with the function that clears its cache
        def bounds(body: Any) -> Any:
            return _NoBounds if isinstance(V.kernel, cpp.CppKernel) and not body.indirect_vars else before(body)

        return bounds

    return [(loop_body.LoopBody, "bounds", unless_looked_up)]


def _fast_loop_bodies() -> Changes:
    from torch._inductor import loop_body

    return [(loop_body.InterpreterShim, "run", _running_bodies)]


def _skip_simplify() -> Changes:
    """Simplifies by variable ranges only if an index has quotients or remainders other than of maxima."""
    from torch._inductor import sizevars
    from torch.utils._sympy.functions import FloorDiv, Max, ModularIndexing

    join_dimensions = getattr(sizevars, "join_dimensions", None)

    def unless_linear(before: Callable[..., Any]) -> Callable[..., Any]:
        def simplify(sizes: Any, expression: Any, ranges: Any) -> Any:  # knowledge of ranges concerns quotients
            if join_dimensions is not None:
                expression = join_dimensions(sizes.simplify(expression))
                if not expression.has(ModularIndexing, FloorDiv) or expression.has(Max):
                    return expression  # known maxima are found without the ranges, which raises
            return before(sizes, expression, ranges)

        return simplify

    return [(sizevars.SizeVarAllocator, "_simplify_with_ranges", unless_linear)]


def _known_fake_values() -> Changes:
    from torch._inductor import compile_fx

    return [(compile_fx, "fake_tensor_prop", known_values)]


_CODEGEN: dict[str, Callable[[], Changes]] = {
    "linear_strides": _linear_strides,
    "shared_dtype_rules": _shared_dtype_rules,
    "skip_empty_tails": _skip_empty_tails,
    "skip_bounds": _skip_bounds,
    "fast_loop_bodies": _fast_loop_bodies,
    "skip_simplify": _skip_simplify,
    "known_fake_values": _known_fake_values,
}


def known_values(before: Callable[..., Any]) -> Callable[..., Any]:
    """Skips the computation of a graph's fake values if every node has one."""

    def propagate(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        if all("val" in node.meta for node in module.graph.nodes if node.op != "output"):
            return V.fake_mode
        return before(module, *args, **kwargs)

    return propagate


def linear_step(index: Any, var: Any) -> Any:
    """Returns the growth of a sum by ``var`` if it only contains integer multiples of it; ``None`` otherwise.

    If ``var`` is clamped to a range, the growth is not a number and is not simplified, which would take a tenth of a
    second.
    """
    import sympy
    from torch.utils._sympy.functions import Max, Min

    if any(limit.has(var) for limit in index.atoms(Max, Min)):
        difference = index.xreplace({var: var + 1}) - index
        return None if difference.is_number else difference
    step = sympy.S.Zero
    for term in sympy.Add.make_args(index):
        if not term.has(var):
            continue
        factor, symbol = term.as_coeff_Mul()
        if not factor.is_Integer or symbol != var:
            return None
        step += factor
    return step


def within_vector(index: Any, var: Any, length: int) -> Any:
    """Returns the index while ``var`` runs through one vector: quotients by multiples of the length stay constant, and
    remainders of them too, except for ``var`` itself."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    known: dict[Any, Any] = {}
    for part in index.atoms(FloorDiv, ModularIndexing):
        base, *numbers = part.args
        if base != var or not all(number.is_Integer for number in numbers):
            continue
        fixed = sympy.Symbol(f"{var}_fixed{len(known)}")
        if numbers[0] % length == 0:
            known[part] = fixed
        elif type(part) is ModularIndexing and numbers[0] == 1 and numbers[1] % length == 0:
            known[part] = var + fixed
    return index.xreplace(known)


def codegen_parts() -> types.SimpleNamespace:
    """Returns the parts of Inductor's C++ code generation that ``compile/backend/cpp_codegen/loop_dedup.py`` uses."""
    from torch._inductor import config, metrics
    from torch._inductor.codegen import common, cpp
    from torch._inductor.utils import IndentedBuffer
    from torch._inductor.virtualized import V

    return types.SimpleNamespace(
        V=V,
        Buffer=IndentedBuffer,
        DeferredLine=common.DeferredLine,
        Proxy=cpp.CppKernelProxy,
        metrics=metrics,
        patch=config.patch,
    )
