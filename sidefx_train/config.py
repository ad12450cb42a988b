"""Options of a compiled step, in one frozen value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sidefx_train.switches import checked, switched_off

BackendFn = Callable[[Any, list[Any]], Callable[..., Any]]
"""``(graph_module, example_inputs) -> callable``, torch's backend signature."""

Backend = Literal["inductor", "eager", "aot_eager"] | BackendFn

BACKEND_NAMES = ("inductor", "eager", "aot_eager")


@dataclass(frozen=True)
class CompileConfig:
    """The options of :func:`sidefx_train.compile`.

    Attributes:
        backend: ``"inductor"``, ``"eager"`` (runs the captured aten graph op by op: the reference), ``"aot_eager"``
            (the functionalized graph op by op), or ``(gm, example_inputs) -> callable``.
        fullgraph: raise :class:`~sidefx_train.errors.GraphBreakError` where a step cannot be captured as one graph.
        dynamic: ``None``: a size is exact until it has changed once, then symbolic in a cache entry of its own.
            ``True``: sizes of the arguments are symbolic from the start. ``False``: every new size is captured again.
        cuda_graphs: ``"auto"``: the second call of a step on a CUDA device records its kernels, and later calls launch
            them together. ``"on"``: also with ``backend="aot_eager"``. ``"off"``: kernels are launched one by one.
        cuda_graph_limit: recordings kept for one graph, one for each combination of sizes; the least recently used is
            dropped first.
        cuda_graph_memory_mb: MiB of results that the recordings of one graph may keep; one is always kept.
        rng: ``"fast"`` lets the backend draw random numbers, ``"eager"`` keeps eager's random stream.
        verify: ``"first"`` compares the first run of every compiled graph with the captured graph run op by op, and a
            later run where the first was inconclusive. A number sets how many first runs are compared, for the
            functionalized graph of ``"aot_eager"`` too; 0 compares none.
        on_failure: ``"eager"`` runs the step eagerly and says why, ``"raise"`` raises.
        warmup: ``"now"``: a call that must be captured waits until it is compiled. ``"background"``: calls run eagerly
            until a worker has compiled the graph.
        partition: how the joint graph is partitioned where the backward is called from outside. ``"min_cut"``: values
            that cheap operations can recompute are not saved. ``"default"``: everything that autograd saves is saved.
        recapture_limit: captures kept for one step before it runs eagerly.
        autotune: ``"on"`` times the candidates for each matrix product, attention, convolution and recurrent layer,
            unless their times are cached. ``"off"``: torch's own choice.
        autotune_seconds: time limit of autotuning for one graph; ten times as long in a worker, where nobody waits.
        deterministic: nothing depends on timing or on the order of threads: the captured step takes over at its first
            call, and kernels are torch's own choice.
        keep_slower: keep a captured step that is slower than eager. Otherwise a few of the first steps run eagerly, to
            compare their times, and a step that is slower captured is left for eager.
        disabled_passes: names in ``sidefx_train/switches.py`` of changes to Inductor's compilation to leave out.
    """

    backend: Backend = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    cuda_graph_limit: int = 8
    cuda_graph_memory_mb: float = 8192.0
    rng: Literal["fast", "eager"] = "fast"
    verify: int | Literal["first"] = "first"
    on_failure: Literal["eager", "raise"] = "eager"
    warmup: Literal["now", "background"] = "now"
    partition: Literal["min_cut", "default"] = "min_cut"
    recapture_limit: int = 16
    autotune: Literal["on", "off"] = "on"
    autotune_seconds: float = 2.0
    deterministic: bool = False
    keep_slower: bool = False
    disabled_passes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.backend) and self.backend not in BACKEND_NAMES:
            raise ValueError(
                f"backend={self.backend!r} is not one of {', '.join(map(repr, BACKEND_NAMES))} "
                "and not a callable (gm, example_inputs) -> callable"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                expected = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")
        if not self.autotune_seconds >= 0:
            raise ValueError(f"autotune_seconds={self.autotune_seconds}: expected a time in seconds, 0 or more")
        if self.cuda_graph_limit < 1:
            raise ValueError(f"cuda_graph_limit={self.cuda_graph_limit}: expected 1 or more")
        if not self.cuda_graph_memory_mb > 0:
            raise ValueError(f"cuda_graph_memory_mb={self.cuda_graph_memory_mb}: expected a size in MiB, more than 0")
        if self.verify != "first" and (not isinstance(self.verify, int) or self.verify < 0):
            raise ValueError(f"verify={self.verify!r}: expected 'first' or a count of steps, 0 or more")
        if isinstance(self.disabled_passes, str):
            raise ValueError(f"disabled_passes={self.disabled_passes!r}: expected a tuple of names, not a string")
        object.__setattr__(self, "disabled_passes", tuple(sorted(checked(self.disabled_passes))))
        switched_off()  # a wrong name in the environment would otherwise only be found where a graph is compiled
        if self.recapture_limit < 1:
            raise ValueError(f"recapture_limit={self.recapture_limit}: expected 1 or more")

    @property
    def strict(self) -> bool:
        """True if a step that cannot be captured as one graph raises instead of running eagerly or in parts."""
        return self.fullgraph or self.on_failure == "raise"

    @property
    def backend_name(self) -> str:
        if isinstance(self.backend, str):
            return self.backend
        return getattr(self.backend, "__name__", type(self.backend).__name__)


_CHOICES = {name: get_args(hint) for name, hint in get_type_hints(CompileConfig).items() if get_origin(hint) is Literal}
"""The allowed values of options that are one of several words."""
