"""Lightning's automatic optimization of one batch, written as one plain function.

Lightning spreads a batch over closures, a strategy, a precision plugin and hooks. :func:`automatic_step` puts the same
calls in the same order into one function that can be captured; :func:`manual_step` does it for
``automatic_optimization=False``. :func:`reason_not_to` names what neither of them reproduces. Whatever the user has not
overridden is left out of the function, so that nothing of Lightning's bookkeeping is read while the step replays.

The order is that of ``lightning.pytorch.loops.optimization.automatic`` and ``plugins.precision.precision``: training
step, loss scaling, zero_grad, backward, ``on_before_optimizer_step``, clipping, update.
"""

from __future__ import annotations

import dis
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from lightning_utilities.core.overrides import is_overridden

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Import names of Lightning; both are the same code with classes of their own."""

_ONE_CLOSURE_CALL: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
    if hasattr(torch.optim, name)
)
"""Optimizers whose ``step(closure)`` calls the closure once, first: the closure may then run before ``step()``."""


class Lightning:
    """The classes of one Lightning package, found from a trainer."""

    def __init__(self, trainer: Any) -> None:
        names = [cls.__module__ for cls in type(trainer).__mro__]
        found = [package for package in PACKAGES if any(name.startswith(package + ".") for name in names)]
        if not found:
            raise TypeError(f"SideFXCompile needs a Lightning Trainer, got {type(trainer).__name__}")
        self.package = found[0]

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def callback(self) -> type:
        return self.module("callbacks").Callback

    @property
    def lightning_module(self) -> type:
        return self.module("core").LightningModule

    @property
    def automatic(self) -> ModuleType:
        return self.module("loops.optimization.automatic")

    @property
    def manual(self) -> ModuleType:
        return self.module("loops.optimization.manual")


def reason_not_to(pl: Lightning, trainer: Any, module: Any) -> str | None:
    """Why this fit is left to Lightning's own path, or ``None`` if its step can be captured."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    plugins = pl.module("plugins.precision")
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer.world_size > 1:
        return f"{trainer.world_size} processes: gradients are synchronized by {type(strategy).__name__}"
    if type(strategy) is not pl.module("strategies").SingleDeviceStrategy:
        return f"strategy {type(strategy).__name__} has its own training step"
    if strategy.model is not module:
        return f"the model is wrapped in {type(strategy.model).__name__}"
    known = (plugins.Precision, plugins.MixedPrecision, plugins.HalfPrecision, plugins.DoublePrecision)
    if type(precision) not in known:
        return f"precision plugin {type(precision).__name__} has its own training step"
    if getattr(precision, "scaler", None) is not None:
        return "16-mixed precision scales gradients by a value that is known only after each step; use bf16-mixed"
    if getattr(module, "_compiler_ctx", None) is not None:
        return "the model has been compiled with torch.compile"
    if trainer._detect_anomaly:
        return "detect_anomaly=True checks every autograd node"
    if pl.module("utilities.signature_utils").is_param_in_hook_signature(
        module.training_step, "dataloader_iter", explicit=True
    ):
        return "training_step takes the dataloader's iterator"
    if type(epoch_loop.automatic_optimization) is not pl.automatic._AutomaticOptimization:
        return f"the optimization loop is a {type(epoch_loop.automatic_optimization).__name__}"
    if type(epoch_loop.manual_optimization) is not pl.manual._ManualOptimization:
        return f"the optimization loop is a {type(epoch_loop.manual_optimization).__name__}"
    if not trainer.optimizers:
        return "there is no optimizer"
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            return "LBFGS runs the step several times for one update"
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(
            optimizer, pl.module("core.optimizer")._MockOptimizer
        ):
            return f"{type(optimizer).__name__} is not a torch optimizer"
    clips_mixed = (
        module.automatic_optimization and type(precision) is plugins.MixedPrecision and trainer.gradient_clip_val
    )
    if clips_mixed and getattr(trainer.optimizers[0], "_step_supports_amp_scaling", False):
        return "Lightning refuses to clip gradients of a fused optimizer in mixed precision"
    return None


@dataclass(frozen=True)
class _Hook:
    """User overrides of one hook, in Lightning's order: callbacks first, then the module.

    While one runs, ``self.log`` must know in which hook it is, as Lightning arranges it.
    """

    module: Any
    name: str
    calls: tuple[Callable[..., Any], ...]
    leading: tuple[tuple[Any, ...], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        previous = self.module._current_fx_name
        self.module._current_fx_name = self.name
        for call, first in zip(self.calls, self.leading, strict=True):
            call(*first, *args, **kwargs)
        self.module._current_fx_name = previous


def _hook(pl: Lightning, trainer: Any, module: Any, name: str) -> _Hook | None:
    owners = [callback for callback in trainer.callbacks if is_overridden(name, callback, pl.callback)]
    calls = [getattr(callback, name) for callback in owners]
    leading: list[tuple[Any, ...]] = [(trainer, module)] * len(calls)
    if is_overridden(name, module, pl.lightning_module):
        calls.append(getattr(module, name))
        leading.append(())
    return _Hook(module, name, tuple(calls), tuple(leading)) if calls else None


def _override(pl: Lightning, module: Any, name: str) -> Callable[..., Any] | None:
    """The user's override of a LightningModule method, called as Lightning calls it; ``None`` if there is none."""
    if not is_overridden(name, module, pl.lightning_module):
        return None
    return _Hook(module, name, (getattr(module, name),), ((),))


def _context(pl: Lightning, precision: Any) -> Callable[[], AbstractContextManager[Any]] | None:
    plugins = pl.module("plugins.precision")
    if type(precision) is plugins.Precision:
        return None
    if type(precision) is plugins.MixedPrecision:
        return precision.autocast_context_manager
    return precision.train_step_context


def _forward(pl: Lightning, trainer: Any, module: Any) -> Callable[..., Any]:
    context = _context(pl, trainer.precision_plugin)
    if context is None:
        return module.training_step

    def in_precision(*args: Any) -> Any:
        with context():
            return module.training_step(*args)

    return in_precision


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


def _make_backward(pl: Lightning, trainer: Any, module: Any) -> Callable[[torch.Tensor], None]:
    before = _hook(pl, trainer, module, "on_before_backward")
    after = _hook(pl, trainer, module, "on_after_backward")
    backward = _override(pl, module, "backward") or _backward
    if before is None and after is None:
        return backward

    def with_hooks(loss: torch.Tensor) -> None:
        if before is not None:
            before(loss)
        backward(loss)
        if after is not None:
            after()

    return with_hooks


def _make_zero_grad(pl: Lightning, trainer: Any, module: Any, optimizer: Any) -> Callable[..., None]:
    before = _hook(pl, trainer, module, "on_before_zero_grad")
    override = _override(pl, module, "optimizer_zero_grad")

    def zero_grad(epoch: int, batch_idx: int) -> None:
        if before is not None:
            before(optimizer)
        if override is not None:
            override(epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    return zero_grad


def _make_before_update(pl: Lightning, trainer: Any, module: Any, optimizer: Any) -> Callable[[], None] | None:
    """Hooks and clipping between backward and update."""
    before = _hook(pl, trainer, module, "on_before_optimizer_step")
    override = _override(pl, module, "configure_gradient_clipping")
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    clip: Callable[[], None] | None = None
    if override is not None:

        def clip() -> None:
            override(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

    elif value is not None and value > 0:
        by_value = algorithm is not None and str(getattr(algorithm, "value", algorithm)).lower() == "value"

        def clip() -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if by_value:
                torch.nn.utils.clip_grad_value_(parameters, value)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, value)

    if before is None:
        return clip
    if clip is None:
        return lambda: before(optimizer)
    after = clip

    def hooks_then_clip() -> None:
        before(optimizer)
        after()

    return hooks_then_clip


def _detached(value: Any) -> Any:
    """``value`` with every tensor in it cut from the autograd graph, which ends with the step."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_detached(item) for item in value])
    return value


def automatic_step(pl: Lightning, trainer: Any, module: Any) -> Callable[..., Any]:
    """``step(zero, update, normalize, epoch, batch_idx, *args)``: one batch of automatic optimization.

    Args of the step: whether gradients are zeroed first, whether the optimizer steps, by what the loss is divided, the
    epoch and batch index for hooks that want them (0 where no hook does), and the arguments of ``training_step``. It
    returns what Lightning hands to ``on_train_batch_end``, or ``None`` if ``training_step`` returned ``None``.
    """
    optimizer = trainer.optimizers[0]
    forward = _forward(pl, trainer, module)
    zero_grad = _make_zero_grad(pl, trainer, module, optimizer)
    backward = _make_backward(pl, trainer, module)
    before_update = _make_before_update(pl, trainer, module, optimizer)
    unpack = pl.automatic.ClosureResult.from_training_step_output

    def loss_and_gradients(zero: bool, normalize: int, epoch: int, batch_idx: int, args: Sequence[Any]) -> Any:
        output = forward(*args)
        if isinstance(output, torch.Tensor):
            loss, extra = output, None
        else:
            result = unpack(output)
            loss, extra = result.closure_loss, result.extra
        kept = None
        if loss is not None:
            if normalize != 1:
                loss = loss / normalize
            kept = {"loss": loss.detach().clone()}
            if extra:
                kept.update(_detached(extra))
        if zero:
            zero_grad(epoch, batch_idx)
        if loss is not None:
            backward(loss)
        return kept

    if not _needs_closure(pl, module, optimizer):

        def sidefx_step(
            zero: bool, update: bool, normalize: int, epoch: int, batch_idx: int, *args: Any
        ) -> dict[str, Any] | None:
            kept = loss_and_gradients(zero, normalize, epoch, batch_idx, args)
            if update:
                if before_update is not None:
                    before_update()
                optimizer.step()
            return kept

        return sidefx_step
    return _closure_step(pl, trainer, module, loss_and_gradients, before_update)


def needs_indices(pl: Lightning, module: Any) -> bool:
    """Whether a hook inside the step is handed the epoch and the batch index."""
    return any(is_overridden(name, module, pl.lightning_module) for name in ("optimizer_step", "optimizer_zero_grad"))


def ignores_argument(function: Any, position: int) -> bool:
    """Whether the code of a plain method never looks at its argument ``position`` (0 is ``self``).

    Wrapped functions and those that could see their variables by other ways are taken to look.
    """
    function = getattr(function, "__func__", function)
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return False
    code = function.__code__
    if position >= code.co_argcount or {"locals", "vars", "eval", "exec", "_getframe"} & set(code.co_names):
        return False
    name = code.co_varnames[position]
    if name in code.co_cellvars:
        return False
    return all(instruction.argval != name for instruction in _with_pairs(code))


def _with_pairs(code: CodeType) -> Iterator[Any]:
    """Instructions on local variables; those that name two at once (3.13) come as two."""
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, tuple):
            yield from (SimpleNamespace(argval=name) for name in instruction.argval)
        elif "FAST" in instruction.opname:
            yield instruction


def _needs_closure(pl: Lightning, module: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether it can be seen that Lightning runs the step inside ``optimizer.step(closure)``."""
    return (
        is_overridden("optimizer_step", module, pl.lightning_module)
        or type(optimizer) not in _ONE_CLOSURE_CALL
        or bool(optimizer._optimizer_step_pre_hooks)
    )


def _closure_step(
    pl: Lightning,
    trainer: Any,
    module: Any,
    loss_and_gradients: Callable[..., Any],
    before_update: Callable[[], None] | None,
) -> Callable[..., Any]:
    """The step for an overridden ``optimizer_step`` or an optimizer that may call its closure as it likes."""
    optimizer = trainer.optimizers[0]
    override = _override(pl, module, "optimizer_step")
    error = pl.module("utilities.exceptions").MisconfigurationException
    wrapper = pl.module("core.optimizer").LightningOptimizer

    def then_before_update(closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = closure()
            if before_update is not None:
                before_update()
            return result

        return run

    class DirectOptimizer(wrapper):  # type: ignore[misc, valid-type]
        """Lightning's wrapper without the way through strategy and precision plugin, which add nothing here."""

        def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return optimizer.step(closure=then_before_update(closure or (lambda: None)), **kwargs)

    handed_over = DirectOptimizer(optimizer)

    def sidefx_step(
        zero: bool, update: bool, normalize: int, epoch: int, batch_idx: int, *args: Any
    ) -> dict[str, Any] | None:
        kept: dict[str, Any] | None = None
        ran = False

        def closure() -> torch.Tensor | None:
            nonlocal kept, ran
            with torch.enable_grad():
                kept = loss_and_gradients(zero, normalize, epoch, batch_idx, args)
            ran = True
            return None if kept is None else kept["loss"]

        if not update:
            closure()
        elif override is not None:
            override(epoch, batch_idx, handed_over, closure)
        else:
            optimizer.step(closure=then_before_update(closure))
        if not ran:
            raise error(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step` "
                "hook? It could also happen because the `optimizer.step(optimizer_closure)` call did not execute it."
            )
        return kept

    return sidefx_step


def manual_step(pl: Lightning, trainer: Any, module: Any) -> Callable[..., Any]:
    """``step(*args)``: ``training_step`` of a module with ``automatic_optimization=False``; tensors come detached."""
    forward = _forward(pl, trainer, module)

    def sidefx_step(*args: Any) -> Any:
        return _detached(forward(*args))

    return sidefx_step
