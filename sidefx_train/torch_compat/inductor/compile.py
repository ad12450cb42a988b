"""Runs Inductor: its passes, its lowering of one graph, and a custom builder for its C++.

What it changes in the process is put back; what its code launches is counted.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from sidefx_train.switches import enabled
from sidefx_train.torch_compat.inductor.checks import checked_codegen
from sidefx_train.torch_compat.inductor.collective_order import collectives_in_order
from sidefx_train.torch_compat.inductor.common_subexpressions import without_common_subexpressions
from sidefx_train.torch_compat.inductor.correctness import right_results
from sidefx_train.torch_compat.inductor.dispatched_calls import calling_dispatcher
from sidefx_train.torch_compat.inductor.lowerings import (
    _call_unlowered,
    convolutions_of_all_sizes,
    pools_of_all_sizes,
    strides_of_all_sizes,
)
from sidefx_train.torch_compat.inductor.patching import replaced, setting
from sidefx_train.torch_compat.inductor.speedups import codegen_parts, quick_codegen, without_idle_patterns

_KERNEL = re.compile(r"^ +\w+\.run\(.*\bstream=", re.MULTILINE)
_LIBRARY = re.compile(r"^ +(?:\w+ = )?(?:extern_kernels|torch\.ops|aten)\.\w", re.MULTILINE)


def launches_of(code: str) -> tuple[int, int]:
    """Returns how many Triton kernels one call of generated Python code launches, and how many operators it calls."""
    return len(_KERNEL.findall(code)), len(_LIBRARY.findall(code))


@contextmanager
def recursion_limit_kept() -> Iterator[None]:
    """Restores the interpreter's recursion limit.

    Upstream: ``compile_fx`` raises the limit to 2000 and leaves it so; a program that reads it sees another value.
    Seen in torch 2.13.
    """
    limit = sys.getrecursionlimit()
    try:
        yield
    finally:
        if sys.getrecursionlimit() != limit:
            sys.setrecursionlimit(limit)


class _DrawsApart:
    """The module ``torch`` with random numbers from generators of its own."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def randn(self, *size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        return made.normal_(generator=torch.Generator(made.device).manual_seed(0))

    def randn_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor).normal_(generator=torch.Generator(tensor.device).manual_seed(0))


@contextmanager
def padding_draws_apart() -> Iterator[None]:
    """Keeps the random stream of the program where padded matrix products are timed on an accelerator.

    Upstream: the operands are drawn from the default generator, so that a step draws other numbers in the process that
    compiles it than in one that finds the choice in the cache. Seen in torch 2.11 to 2.15.
    """
    from torch._inductor.fx_passes import pad_mm

    with replaced(pad_mm, "torch", _DrawsApart):
        yield


@contextmanager
def inductor_lowering(
    fake_mode: FakeTensorMode, generating: Callable[[Callable[..., None]], Callable[..., None]] = lambda before: before
) -> Iterator[None]:
    """Context around :func:`inductor_passes` and :func:`inductor_compile`.

    Args:
        fake_mode: fake mode of the graph's values.
        generating: returns the replacement of the method that generates a C++ loop.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    with (
        V.set_fake_mode(fake_mode),
        tracing(TracingContext(fake_mode)),
        torch.no_grad(),
        quick_codegen(),
        right_results(),
        convolutions_of_all_sizes(),
        pools_of_all_sizes(),
        strides_of_all_sizes(),
        padding_draws_apart(),
        checked_codegen(),
        recursion_limit_kept(),
        replaced(codegen_parts().Proxy, "codegen_nodes", generating),
    ):
        yield


def inductor_passes(module: fx.GraphModule, finds_attention: bool = True) -> fx.GraphModule:
    """Returns a functional graph after Inductor's joint-graph passes.

    Args:
        module: the graph; it is not changed.
        finds_attention: it may contain decomposed attention; False saves the time to look for it.
    """
    from torch._inductor import compile_fx

    module = without_common_subexpressions(module)
    with nullcontext() if finds_attention or not enabled("idle_patterns") else without_idle_patterns(module):
        lowered = cast(fx.GraphModule, compile_fx._recursive_joint_graph_passes(module))
    _drop_unused_draws(lowered.graph)
    return lowered


def _drop_unused_draws(graph: fx.Graph) -> None:
    """Erases seeds of random numbers that nothing uses: the prologue has drawn them.

    Upstream: the code fills a seed into a buffer that it does not allocate, as no kernel reads it. Seen in torch 2.15.
    """
    prims = torch.ops.prims
    seeds = (prims.inductor_seeds.default, prims.inductor_lookup_seed.default)
    drawn: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in seeds or not drawn.isdisjoint(node.all_input_nodes):
            drawn.add(node)
    for node in reversed(list(graph.nodes)) if drawn else ():
        if node in drawn and not node.users and (node.target in seeds or not node.is_impure()):
            graph.erase_node(node)


def inductor_compile(module: fx.GraphModule, example_inputs: list[Any], static: list[int]) -> tuple[Any, str]:
    """Lowers a result of :func:`inductor_passes`.

    Args:
        module: the graph.
        example_inputs: its fake inputs.
        static: positions of inputs with fixed addresses.

    Returns:
        A callable that takes one list of real inputs, and the generated code.
    """
    from torch._inductor import compile_fx

    _call_unlowered(module.graph)
    output = next(iter(reversed(module.graph.nodes)))
    compile_fx.record_original_output_strides(module)
    output.meta["user_visible_output_idxs"] = [i for i, node in enumerate(output.args[0]) if isinstance(node, fx.Node)]
    with _folder_removed(lambda: compile_fx.config.cpp_wrapper) as used_by, collectives_in_order(module.graph):
        compiled = compile_fx.compile_fx_inner(
            module,
            example_inputs,
            static_input_idxs=static,
            is_inference=True,
            cpp_wrapper=compile_fx.config.cpp_wrapper,
        )
        used_by.append(getattr(compiled, "current_callable", None) or compiled)
    code = getattr(compiled, "source_code", "")
    return getattr(compiled, "current_callable", None) or compiled, code


@contextmanager
def _folder_removed(at_once: Callable[[], bool]) -> Iterator[list[Any]]:
    """Removes the folder that a graph is compiled in where Inductor uses no cache.

    Inductor leaves it for ever, since generated Python is in it and what that loads, and names it in the log if it
    fails.

    Args:
        at_once: true if nothing is loaded from it later: a library of all is built elsewhere.

    Yields:
        A list for the graph, as long as which the folder is needed otherwise.
    """
    from torch._inductor import compile_fx, utils

    folders: list[str] = []
    used_by: list[Any] = []

    @contextmanager
    def folder() -> Iterator[None]:
        if not compile_fx.config.force_disable_caches:
            yield
            return
        folders.append(tempfile.mkdtemp(prefix="sidefx_"))
        with utils.fresh_cache(dir=folders[-1], delete=False):
            yield

    silent = lambda record: not str(record.msg).startswith("on error, temporary cache dir kept")  # noqa: E731
    utils.log.addFilter(silent)
    try:
        with replaced(compile_fx, "with_fresh_cache_if_config", lambda before: folder):
            yield used_by
    finally:
        utils.log.removeFilter(silent)
        for each in folders:
            if used_by and not at_once():
                weakref.finalize(used_by[0], shutil.rmtree, each, True)
                continue
            shutil.rmtree(each, ignore_errors=True)
            if not used_by:  # compilers that Inductor's threads have started may still write to it
                atexit.register(shutil.rmtree, each, True)


@contextmanager
def numbering_kernels(graph: int) -> Iterator[None]:
    """Context in which kernels of lowered graphs have unique names, also among graphs of other numbers."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    numbers = itertools.count()
    number = lambda before: lambda wrapper: f"{graph}_{next(numbers)}"  # noqa: E731
    with replaced(PythonWrapperCodegen, "next_kernel_suffix", number):
        yield


@contextmanager
def lowering_notes() -> Iterator[list[str]]:
    """Context that yields Inductor's warnings during lowering as notes for the report, complete at its end."""
    from torch._inductor import lowering

    dispatched: dict[str, None] = {}
    complex_numbers: dict[str, None] = {}

    def keep(record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("%s is missing a c-shim implementation"):
            return True
        dispatched.update(dict.fromkeys(map(str, record.args or ())))
        return False

    def note_complex(before: Callable[[], None]) -> Callable[[], None]:
        return lambda: complex_numbers.update({"operators on complex numbers are calls, not loops": None})

    logger = logging.getLogger("torch._inductor.ir")
    logger.filters.insert(0, keep)  # before one that is around this
    notes: list[str] = []
    try:
        with replaced(lowering, "_warn_complex_not_supported", note_complex):
            yield notes
    finally:
        logger.removeFilter(keep)
        notes.extend(complex_numbers)
        if dispatched:
            notes.append(f"called through torch's dispatcher: {', '.join(dispatched)}")


@contextmanager
def building_cpp(
    build: Callable[[str, str, int, list[str]], Callable[[list[Any]], list[Any]]], add: Callable[[str], None]
) -> Iterator[None]:
    """Context in which ``build``, instead of Inductor's own builder, builds its C++ for a whole CPU graph.

    Args:
        build: ``build(caller, kernels, outputs, libraries)`` gets the source of ``inductor_entry_impl``, that of the
        kernels it calls (empty if it is in the first), the number of outputs, and libraries to link. It returns a
        function from the capsules of the inputs to those of the outputs.
        add: called with the source of each C++ kernel when it has been written, before all that.
    """
    from torch._inductor.codecache import CppWrapperCodeCache
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    def telling(before: Callable[..., Any]) -> Callable[..., Any]:
        def define_kernel(wrapper: Any, name: str, body: str, *rest: Any, **more: Any) -> Any:
            add(body)
            return before(wrapper, name, body, *rest, **more)

        return define_kernel

    others = CppWrapperCodeCache.load_pybinding

    def load(argtypes: Sequence[str], main_code: str, device_type: str = "cpu", **given: Any) -> Any:
        if device_type != "cpu":
            return others(argtypes, main_code, device_type, **given)
        return build(
            main_code, given.get("kernel_code") or "", given.get("num_outputs", -1), list(given.get("extra_flags", ()))
        )

    with setting(CppWrapperCodeCache, "load_pybinding", staticmethod(load)):
        with replaced(PythonWrapperCodegen, "define_kernel", telling), calling_dispatcher():
            yield


def call_aoti(entry: Callable[[list[Any]], list[Any]], numbers: Sequence[int] = ()) -> Callable[[list[Any]], list[Any]]:
    """Wraps a function over capsules of tensors as a function of one list of inputs, which it empties.

    Args:
        entry: the function in a library.
        numbers: positions of inputs that are Python numbers.
    """
    to_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    from_handles = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs

    def call(args: list[Any]) -> list[Any]:
        for i in numbers:
            args[i] = torch.tensor(args[i], device="cpu")
        handles = to_handles(args)
        args.clear()
        return from_handles(entry(handles))  # type: ignore[no-any-return]

    return call
