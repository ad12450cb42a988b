"""Decides whether the installed torch and Python can be used for captures; steps run eagerly where they cannot.

The compiler imports private names of torch, and a release that is not known yet may lack one: then the import below
fails, and nothing of the compiler is used. On a build of torch that is not among :data:`TESTED`, a small step is also
captured and compared with eager, once per build (a pass is kept in the disk cache).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import disk_cache
from sidefx_train.compile.common.user_code import describable, global_name_of, name_of
from sidefx_train.config import CompileConfig
from sidefx_train.errors import GraphBreakError, SideFXError, SideFXWarning
from sidefx_train.report import StepReport

CODE = "SFX401"

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Releases of torch on which tests have run; ``docs/limits.md`` says how many of them."""

PYTHONS = ((3, 11), (3, 14))
"""The first and the last release of Python whose bytecode is interpreted."""

IMPORT_ERROR: Exception | None = None
"""Why the compiler could not be imported, or ``None``."""


class EagerStep:
    """Has the methods of a :class:`~sidefx_train.CompiledStep`; every call runs the function itself.

    Args:
        fn: function, bound method, ``nn.Module``, partial or callable object.
        config: options; ``fullgraph=True`` and ``on_failure="raise"`` make calls raise ``GraphBreakError``.
    """

    def __init__(self, fn: Callable[..., Any], config: CompileConfig) -> None:
        if not callable(fn):
            raise TypeError(f"sidefx_train.compile needs a callable, got {type(fn).__name__}")
        self.config = config
        self._fn = fn
        self._report = self._new_report()
        functools.update_wrapper(self, fn if isinstance(fn, types.FunctionType) else describable(fn), updated=())
        self.__wrapped__ = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._report.calls += 1
        reason = str(unsupported())
        if self.config.fullgraph or self.config.on_failure == "raise":
            self._report.record_break(CODE, reason)
            raise GraphBreakError(CODE, reason)
        self._report.record_fallback(CODE, reason)
        _warn_once(reason)
        return self._fn(*args, **kwargs)

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        return self if owner is None else EagerStep(types.MethodType(self._fn, owner), self.config)

    def __repr__(self) -> str:
        return f"<EagerStep {self._report.name}>"

    def __copy__(self) -> EagerStep:
        return EagerStep(self._fn, self.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerStep:
        return EagerStep(copy.deepcopy(self._fn, memo), self.config)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return global_name_of(self, self._fn) or (EagerStep, (self._fn, self.config))

    def report(self) -> StepReport:
        """Returns the report: every call is an eager step, with the reason."""
        return self._report

    def reset(self) -> None:
        """Drops the report."""
        self._report = self._new_report()

    def wait(self, timeout: float | None = None) -> bool:
        """Returns True: no background compilation runs."""
        return True

    def end(self) -> None:
        """Does nothing: there is no background compilation."""

    def dispatch_seconds(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Returns an empty dict: nothing is replayed."""
        return {}

    def _new_report(self) -> StepReport:
        return StepReport(name=name_of(self._fn), backend=self.config.backend_name)


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"[{CODE}] steps run eagerly: {reason}", SideFXWarning, stacklevel=3)


if TYPE_CHECKING:
    from sidefx_train.compile.runtime.compiled_step import CompiledStep
else:
    try:
        import sidefx_train.compile.capture.interceptors
        import sidefx_train.compile.distributed
        import sidefx_train.hooks
        import sidefx_train.optim  # noqa: F401 - all register with the compiler
        from sidefx_train.compile.runtime.compiled_step import CompiledStep
        from sidefx_train.torch_compat import import_what_captures_need

        import_what_captures_need()
    except Exception as error:  # whatever a later torch does at import: steps run eagerly, and say so
        IMPORT_ERROR = error
        CompiledStep = EagerStep


def is_tested() -> bool:
    """Returns True for a release in :data:`TESTED`."""
    return ".".join(torch.__version__.split(".")[:2]) in TESTED and ".dev" not in torch.__version__


def unsupported() -> str | None:
    """Returns why steps run eagerly on this build of torch and Python, or ``None`` where they are captured."""
    if not reads_bytecode():
        found, (first, last) = sys.version_info, PYTHONS
        kind = f"Python {found[0]}.{found[1]}{' without a global lock' if _is_free_threaded() else ''}"
        return f"{kind} has another bytecode; supported are 3.{first[1]} to 3.{last[1]}"
    failure = f"{_described(IMPORT_ERROR)} on import" if IMPORT_ERROR is not None else None
    if failure is None and not is_tested():
        failure = _self_test_once()
    supported = f"torch {torch.__version__}, supported are {TESTED[0]} to {TESTED[-1]}"
    return None if failure is None else f"{failure}; {supported}"


def reads_bytecode() -> bool:
    """Returns True for a Python whose bytecode is interpreted."""
    version = sys.version_info[:2]
    return PYTHONS[0] <= version <= PYTHONS[1] and not (version >= (3, 14) and _is_free_threaded())


def _is_free_threaded() -> bool:
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def make_step(fn: Any, config: CompileConfig) -> Any:
    """Returns a compiled step, or an :class:`EagerStep` on a torch that is not supported."""
    return (CompiledStep if unsupported() is None else EagerStep)(fn, config)


@functools.cache
def _self_test_once() -> str | None:
    build = f"{torch.__version__} {torch.version.git_version} {disk_cache.package_hash()}"
    key = hashlib.sha256(build.encode()).hexdigest()[:32]
    if disk_cache.load("other", key, machine=True) == build:
        return None
    failure = self_test()
    if failure is None:
        disk_cache.store("other", key, build, f"self-test of captures on torch {torch.__version__}", machine=True)
    return failure


def self_test() -> str | None:
    """Captures a small training step and compares three calls with eager, bit by bit.

    Returns:
        What failed, or ``None``. The random state is unchanged.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want, got = _trained(compiled=False), _trained(compiled=True)
    except Exception as error:
        return f"the self-test of captures raised {_described(error)}"
    for name, value in want.items():
        same = torch.equal(value, got[name]) if isinstance(value, torch.Tensor) else value == got[name]
        if not same:
            return f"the self-test of captures got another {name} than eager"
    return None


def _trained(compiled: bool) -> dict[str, Any]:
    """Returns what three calls of a step leave: parameters, buffers, optimizer state, results, effects."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
    )
    net = net.to(torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses: list[torch.Tensor] = []
    seen: list[int] = []
    net[0].register_forward_hook(lambda module, args, output: seen.append(len(seen)))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        x.add_(1.0)
        losses.append(loss.detach())
        return x[1:]

    options = CompileConfig(backend="eager", fullgraph=True, on_failure="raise", rng="eager", verify=0)
    call: Any = CompiledStep(step, options) if compiled else step
    views = []
    for number in range(3):
        x = torch.randn(4, 6, dtype=torch.float32)
        views.append(call(x, torch.tensor([0, 1, 2, number % 3])))
        views.append(x)
    if compiled and call.report().replays != 3:
        raise RuntimeError(f"{call.report().replays} of 3 calls were replayed")
    state = {f"{name} of parameter {number}": value for number, found in optimizer.state_dict()["state"].items()
             for name, value in found.items()}  # fmt: skip
    results = {f"result {number}": value for number, value in enumerate((*views, *losses))}
    return {**net.state_dict(), **state, **results, "list of a hook": seen}


def _described(error: BaseException) -> str:
    text = f"[{error.code}] {error.reason}" if isinstance(error, SideFXError) else str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
