"""The public function ``sidefx_train.compile`` and ``sidefx_train.explain``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from sidefx_train.compile.common.sentinels import DYNAMIC_DIMS
from sidefx_train.compile.runtime.compiled_module import compiled_module, model_of, step_of
from sidefx_train.compile.torch_support import make_step, unsupported
from sidefx_train.config import Backend, CompileConfig
from sidefx_train.report import PrefetchRecord, StepReport

if TYPE_CHECKING:
    from sidefx_train.compile.gpu.prefetch import LoopPrefetch


def compile_step(
    fn: Callable[..., Any] | None = None,
    *,
    backend: Backend = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    cuda_graphs: Literal["auto", "on", "off"] = "auto",
    cuda_graph_limit: int = 8,
    cuda_graph_memory_mb: float = 8192.0,
    rng: Literal["fast", "eager"] = "fast",
    verify: int | Literal["first"] = "first",
    on_failure: Literal["eager", "raise"] = "eager",
    warmup: Literal["now", "background"] = "now",
    partition: Literal["min_cut", "default"] = "min_cut",
    recapture_limit: int = 16,
    autotune: Literal["on", "off"] = "on",
    autotune_seconds: float = 2.0,
    deterministic: bool = False,
    keep_slower: bool = False,
    disabled_passes: tuple[str, ...] = (),
) -> Any:
    """Compiles a whole training step. Works as a decorator or as a call with the step.

    Args:
        fn: function, bound method, ``nn.Module``, partial or callable object.
        backend: ``"inductor"``, ``"eager"`` (the captured aten graph op by op), ``"aot_eager"``, or a callable
            ``(gm, example_inputs) -> callable``.
        fullgraph: raise ``GraphBreakError`` where the step cannot be captured as one graph.
        dynamic: ``None``: a size is exact until it has changed once, then symbolic in a cache entry of its own.
            ``True``: sizes of the arguments are symbolic from the start. ``False``: every new size is captured again.
        cuda_graphs: ``"auto"``: the second call of a step on a CUDA device records its kernels, and later calls launch
            them together. ``"on"``: also with ``backend="aot_eager"``. ``"off"``: kernels are launched one by one.
            ``report.captures[i].cuda_graph`` says how many calls were replayed, and why others were not.
        cuda_graph_limit: recordings kept for one graph, one for each combination of sizes; the least recently used is
            dropped first.
        cuda_graph_memory_mb: MiB of results that the recordings of one graph may keep; one is always kept.
        rng: ``"fast"`` lets the backend draw random numbers, ``"eager"`` keeps eager's random stream.
        verify: ``"first"`` compares the first run of every compiled graph, on copies, with the captured graph run op by
            op, and a later run where all results of the first were zeros. A graph that differs by more than rounding is
            not used, and a warning says what differs. This costs about one eager step and its memory, once (the report
            says how much). A number sets how many first runs are compared; ``0`` compares none.
        on_failure: ``"eager"`` runs a step that cannot be captured eagerly and says why, ``"raise"`` raises.
        warmup: ``"now"``: the first call waits until its graph is compiled. ``"background"``: steps run eagerly while a
            worker compiles, and the captured step takes over between two calls; ``step.wait()`` waits for the worker.
        partition: for a model or loss compiled alone: ``"min_cut"`` saves less for the backward and recomputes what is
            cheap, ``"default"`` saves what autograd saves.
        recapture_limit: captures kept for the step. When the limit is reached, calls that match no entry run eagerly,
            and a warning names the value that keeps changing.
        autotune: ``"on"`` times candidates for each matrix product, attention, convolution and recurrent layer on this
            machine (once: times are kept on disk, and are in ``report.captures[i].choices``); ``"off"`` uses torch's
            choice.
        autotune_seconds: time limit of autotuning for one graph; ten times as long with ``warmup="background"``, where
            nobody waits. What the limit leaves untimed uses the candidate chosen most often in the graph.
        deterministic: two runs on one machine give the same bits: the captured step takes over at its first call
            (``warmup`` is ``"now"``), nothing is chosen by timing, and sums do not depend on the timing of threads.
            ``torch.use_deterministic_algorithms(True)`` has the same effect.
        keep_slower: keep a captured step that is slower than eager. By default the first calls alternate between blocks
            of captured and of eager steps, some tens in all, to compare their times; a step that is slower captured
            runs eagerly from then on. ``"eager"``, ``"aot_eager"`` and ``deterministic`` steps are not compared.
        disabled_passes: names in ``sidefx_train.switches.SWITCHES`` of changes to Inductor's compilation to leave out,
            to find the one that causes a wrong, slow or failing graph. The environment variable ``SIDEFX_DISABLE`` does
            the same for a process.

    Returns:
        A :class:`CompiledStep`, or a decorator that makes one. For a model: the model with its call compiled. It has
        the model's class, parameters, attributes and hooks under their names, and ``report`` and the other methods of a
        step where the model has no attribute of that name.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: an option has an unknown value.
    """
    config = CompileConfig(
        backend=backend,
        fullgraph=fullgraph,
        dynamic=dynamic,
        cuda_graphs=cuda_graphs,
        cuda_graph_limit=cuda_graph_limit,
        cuda_graph_memory_mb=cuda_graph_memory_mb,
        rng=rng,
        verify=verify,
        on_failure=on_failure,
        warmup=warmup,
        partition=partition,
        recapture_limit=recapture_limit,
        autotune=autotune,
        autotune_seconds=autotune_seconds,
        deterministic=deterministic,
        keep_slower=keep_slower,
        disabled_passes=disabled_passes,
    )
    return (lambda inner: _compiled(inner, config)) if fn is None else _compiled(fn, config)


def _compiled(fn: Any, config: CompileConfig) -> Any:
    if not isinstance(fn, torch.nn.Module):
        return make_step(fn, config)
    model = model_of(fn)
    return compiled_module(model, make_step(model, config))


def explain(step: Any) -> StepReport:
    """Returns the report: what was captured of a step, and why not more.

    Args:
        step: a :class:`CompiledStep`, or anything with a ``report`` (the callback, the result of ``fit``).

    Raises:
        TypeError: ``step`` has no report.
    """
    report = getattr(step_of(step), "report", None)
    report = report() if callable(report) else report
    if not isinstance(report, StepReport):
        raise TypeError(f"explain needs what sidefx_train.compile returned, got {type(step).__name__}")
    return report


def mark_dynamic(tensor: torch.Tensor, dim: int | Sequence[int]) -> None:
    """Marks a size of a tensor as dynamic: a step captured with this tensor accepts any size there.

    Without this a size is exact until it has changed once. Sizes 0 and 1 stay exact: torch treats them differently.

    Args:
        tensor: an argument of the step, or a tensor the step reads.
        dim: one dimension or several; negative ones count from the end.

    Raises:
        IndexError: the tensor has no such dimension.
    """
    dims = [dim] if isinstance(dim, int) else list(dim)
    for one in dims:
        if not -tensor.dim() <= one < tensor.dim():
            raise IndexError(f"dimension {one} of a tensor of {tensor.dim()} dimensions")
    setattr(tensor, DYNAMIC_DIMS, tuple({*getattr(tensor, DYNAMIC_DIMS, ()), *(one % tensor.dim() for one in dims)}))


def loop_prefetch(device: torch.device, record: PrefetchRecord) -> LoopPrefetch | None:
    """Returns what copies the batches of a loop to a device ahead; ``None`` where that is no GPU, or if this torch is
    not supported."""
    if unsupported() is not None:
        return None
    from sidefx_train.compile.gpu import replaying

    return replaying.loop_prefetch(device, record)
