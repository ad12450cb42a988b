"""Compares the first runs of a compiled graph with the captured graph run op by op.

A compiled graph is used after verification: both run from the same inputs and the same random state, on copies, and all
results and written inputs are compared (``comparison.py``). A forked worker that compiles in the background also
compares; its verdict replaces the first run's here.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from sidefx_train import disk_cache as cache
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.verification.comparison import Outcome, differing, pairs
from sidefx_train.compile.backend.verification.exact import widened
from sidefx_train.compile.backend.verification.origins import Origins
from sidefx_train.compile.backend.verification.python_operators import CalledOnce, python_operators
from sidefx_train.compile.backend.verification.reference import Reference
from sidefx_train.compile.common import signal_handlers
from sidefx_train.compile.gpu.static_replay import nothing_recorded
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.graph.collectives import communicates
from sidefx_train.compile.graph.devices import generators_of
from sidefx_train.compile.graph.strided_layout import last_offset

LATER = (3, 10, 30)
"""Runs after which a graph is compared again if its results were only zeros, which prove nothing."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        differs: description of the difference; empty if there is none.
        unproven: why nothing could be compared; empty if it was.
        shows: no result was only zeros, which may hide an error.
        seconds: seconds it took.
        in_background: it was made in the background; training did not wait.
        earlier: an earlier process made it.
    """

    differs: str = ""
    unproven: str = ""
    shows: bool = True
    seconds: float = 0.0
    in_background: bool = False
    earlier: bool = False

    def __str__(self) -> str:
        if self.unproven:
            return f"not compared with the captured graph: {self.unproven}"
        if self.earlier:
            return "equal to the captured graph run op by op when an earlier process compared the same library with it"
        took = f"the comparison took {1e3 * self.seconds:.1f} ms{', in the background' if self.in_background else ''}"
        return f"equal to the captured graph run op by op ({took})"


def verified(
    executable: Executable,
    traced: TracedGraph,
    reference: Callable[[], Reference | None],
    runs: int | None,
    report: Callable[[str], None],
    done: Callable[[str], None] = lambda text: None,
    verdict: Verdict | None = None,
    costly: bool = False,
) -> Executable:
    """Compares the first runs with the graph run op by op.

    If a run differs, ``report`` is called and the compiled graph is never used again, but the reference instead.

    Args:
        executable: the compiled graph.
        traced: the captured graph.
        reference: creates what it is compared with; ``None`` if there is nothing.
        runs: how many runs to compare; ``None``: the first, and a few later ones while results are zeros only.
        report: called with a description of the difference; it may raise, since nothing has been changed yet.
        done: called with the result of a comparison and its cost, as text.
        verdict: result of a comparison made elsewhere, in place of the first run's.
        costly: creating the reference takes much longer than running it: the proof of equality of a cached graph is
            cached too, and later processes do not compare it by default.
    """
    if verdict is None and costly and runs is None and executable.identity and cache.load("proof", executable.identity):
        done(str(Verdict(earlier=True)))
        return executable
    proving = Proving(executable, traced, reference, runs, report, done, costly)
    if verdict is None or verdict.unproven:
        return replace(executable, run=proving)
    return replace(executable, run=executable.run if proving.hear(verdict) else proving)


class Proving:
    """A compiled graph under comparison, callable like one.

    Attributes:
        final: what to call from now on; None while comparisons go on.
        compiled: the compiled graph.
    """

    def __init__(
        self,
        executable: Executable,
        traced: TracedGraph,
        reference: Callable[[], Reference | None],
        runs: int | None,
        report: Callable[[str], None],
        done: Callable[[str], None],
        costly: bool = False,
    ) -> None:
        self._costly = costly
        self._executable, self._traced, self._report, self._done = executable, traced, report, done
        self._make_reference = reference
        self.compiled = executable.run
        self.final: Callable[[list[Any]], Sequence[Any]] | None = None
        self._left = 1 if runs is None else runs
        self._deferred = list(LATER) if runs is None else []
        self._reference: Reference | None = None
        self._run: Callable[[list[Any]], Sequence[Any]] = self._compared
        self._drawn_from = generators_of(traced)
        self._python = python_operators(traced.module)
        self._once: CalledOnce | None = None

    @property
    def calls_python(self) -> bool:
        """True if the graph calls kernels in Python of the program, which only this process may call."""
        return bool(self._python)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self._run(args)

    def hear(self, verdict: Verdict) -> bool:
        """Handles the verdict of the first run; returns True if nothing more is to be compared."""
        if verdict.differs:
            self._run = self._refused(verdict.differs)
            return False
        self._done(str(verdict))
        return self._passed(verdict)

    def compare(self, args: list[Any]) -> Verdict:
        """Runs both on copies of the inputs; restores the random state."""
        with (
            compat.autocast_depth_kept(),
            compat.default_device_cpu(),  # the caller's default device is not for tensors that a comparison makes
            compat.OneProcess() if communicates(self._traced.module.graph) else nullcontext(),
        ):
            return signal_handlers.interruptible(self._compare, args)

    def _compare(self, args: list[Any]) -> Verdict:
        if not all(compat.has_memory(value) for value in args if isinstance(value, torch.Tensor)):
            return Verdict(unproven="an input has no memory")
        began = time.perf_counter()
        if self._reference is None:
            try:
                self._reference = self._make_reference()
            except Exception as error:  # the report says so
                return Verdict(unproven=f"{type(error).__name__}: {error}")
        reference = self._reference
        if reference is None:
            return Verdict(unproven="it draws its own random numbers")
        try:
            compiled, captured = copies(args), copies(args)
        except (MemoryError, torch.OutOfMemoryError):
            return Verdict(unproven="no memory for copies of the inputs")
        with self._same_draws(), nothing_recorded(), self._one_run():
            have = Outcome(list(self._executable.run(list(compiled))), compiled)
        try:
            with self._same_draws(), self._one_run():
                want = Outcome(list(reference.run(list(captured))), captured)
        except Exception as error:  # for example, it cannot use what a compiled forward saved; the report says so
            return Verdict(unproven=f"it raised {type(error).__name__}: {error}")
        found = pairs(args, have, want, self._planned())

        def noisy(seed: int) -> Outcome | None:
            inputs = copies(args)
            try:
                with self._same_draws(), self._one_run():
                    return Outcome(list(reference.noisy(list(inputs), seed)), inputs)
            except RuntimeError:  # noise left an operator's domain: the other runs decide
                return None

        def exact() -> Outcome | None:
            try:
                inputs = widened(args)
                with self._same_draws(), self._one_run():
                    return Outcome(list(reference.exact(list(inputs))), inputs)
            except Exception:  # operators without float64, or no memory for it: doubts remain
                return None

        def filled(value: float) -> Outcome | None:
            if reference.filled is None:
                return None
            inputs = copies(args)
            try:
                with self._same_draws(), self._one_run():
                    return Outcome(list(reference.filled(list(inputs), value)), inputs)
            except Exception:  # an error that depends on such memory: the other runs decide
                return None

        wrong = differing(found, have, want, noisy, exact, filled)
        differs = Origins(self._traced).in_words(wrong) if wrong else ""
        verdict = Verdict(differs, "", all(pair.shows for pair in found), time.perf_counter() - began)
        if self._costly and verdict.shows and not differs and self._executable.identity:
            cache.store("proof", self._executable.identity, {"seconds": verdict.seconds}, "equal to its captured graph")
        return verdict

    def _compared(self, args: list[Any]) -> Sequence[Any]:
        if not all(compat.has_memory(value) for value in args if isinstance(value, torch.Tensor)):
            return self._executable.run(args)  # a freed storage can be neither copied nor compared
        self._once = CalledOnce(self._python) if self._python else None
        try:
            verdict = self.compare(args)
            run = self._refused(verdict.differs) if verdict.differs else self._executable.run
            if not verdict.differs:
                self._done(str(verdict))
                if verdict.unproven:
                    self._settle(run)
                else:
                    self._passed(verdict)
            with self._one_run():
                return run(args)
        finally:
            self._once = None

    def _passed(self, verdict: Verdict) -> bool:
        """Counts a comparison without difference; returns True if it was the last."""
        self._left -= 1
        if self._left > 0:
            return False
        if not verdict.shows and self._deferred:
            self._run, self._left = self._waiting(self._deferred.pop(0)), 1
            return False
        self._settle(self._executable.run)
        return True

    def _refused(self, differs: str) -> Callable[[list[Any]], Sequence[Any]]:
        """Reports a difference, once, and runs the captured graph from then on."""

        def run(args: list[Any]) -> Sequence[Any]:
            reference = self._reference or self._make_reference()
            assert reference is not None, "something was compared with"
            replacement = reference.replacement()
            self._settle(replacement)
            self._report(differs)
            return replacement(args)

        return run

    def _settle(self, run: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._run = self.final = run
        self._executable.functional.clear()  # nothing is compared with it any more

    def _waiting(self, runs: int) -> Callable[[list[Any]], Sequence[Any]]:
        """Runs the compiled graph a few times before the next comparison."""

        def run(args: list[Any]) -> Sequence[Any]:
            nonlocal runs
            runs -= 1
            if runs <= 0:
                self._run = self._compared
            return self._executable.run(args)

        return run

    @contextmanager
    def _one_run(self) -> Iterator[None]:
        """Context of a run among several from the same inputs; only the first calls kernels in Python."""
        if self._once is None:
            yield
            return
        self._once.begin_run()
        with self._once:
            yield

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Context that restores the random state."""
        states = [generator.get_state() for generator in self._drawn_from]
        try:
            yield
        finally:
            for generator, state in zip(self._drawn_from, states, strict=True):
                generator.set_state(state)

    def _planned(self) -> list[torch.dtype | None]:
        """Returns the dtypes of the outputs as traced: the reference's kernels may round statistics of norms
        differently."""
        outputs = next(iter(reversed(self._traced.module.graph.nodes))).args[0]
        return [getattr(node.meta.get("val"), "dtype", None) if isinstance(node, fx.Node) else None for node in outputs]


def copies(args: list[Any]) -> list[Any]:
    """Returns copies of the tensors that share storage like the originals."""
    strided = [each for each in args if isinstance(each, torch.Tensor) and each.layout == torch.strided]
    storages = Counter(value.untyped_storage().data_ptr() for value in strided)
    memo: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided:
            return value.detach().clone()
        if not compat.has_memory(value):  # freed: the graph allocates it before it writes
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            made.untyped_storage().resize_(0)
            return made
        shared = storages[value.untyped_storage().data_ptr()] > 1
        return copy.deepcopy(value.detach(), memo) if shared else _copy(value.detach())

    return [copied(value) for value in args]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor with its strides, on which compiled code relies, to new storage."""
    dense = tensor.clone()
    if dense.stride() == tensor.stride() or tensor.numel() == 0:
        return dense
    span = tensor.as_strided((last_offset(tensor) + 1,), (1,)).clone()
    return span.as_strided(tensor.shape, tensor.stride())
