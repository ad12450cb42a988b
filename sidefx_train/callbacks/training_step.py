"""Lightning's optimization of one batch, written as one plain function.

Lightning spreads a batch over closures, a strategy, a precision plugin and hooks. :func:`automatic_step` and
:func:`manual_step` call the same functions in the same order from one function that can be captured, without the loop's
arithmetic on batch numbers. They look up hooks, callbacks, methods and options at each call, where Lightning does, so
that replacing or setting one later fails a guard. :func:`reason_not_to` names every setting that is left to Lightning's
own path.
"""

from __future__ import annotations

import dis
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sidefx_train.compile.common import interceptor_registry as registry

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Import names of Lightning; both contain the same code with separate classes."""


class Lightning:
    """The classes of one Lightning package, found from one of its trainers or modules."""

    def __init__(self, member: Any) -> None:
        names = [cls.__module__ for cls in type(member).__mro__]
        found = [package for package in PACKAGES if any(name.startswith(package + ".") for name in names)]
        if not found:
            raise TypeError(f"SideFXCompile needs a Lightning Trainer, got {type(member).__name__}")
        self.package = found[0]

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")

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
    """Returns why this fit is left to Lightning's own path, or ``None`` if its step can be captured."""
    precision = trainer.precision_plugin
    plugins = pl.module("plugins.precision")
    epoch_loop = trainer.fit_loop.epoch_loop
    reason = _of_strategy(pl, trainer, module)
    if reason is not None:
        return reason
    known = (plugins.Precision, plugins.MixedPrecision, plugins.HalfPrecision, plugins.DoublePrecision)
    if type(precision) not in known:
        return f"precision plugin {type(precision).__name__} has its own training step"
    if not plain_scaler(precision):
        return f"gradient scaler {type(precision.scaler).__name__} has its own update"
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
    return None


def _of_strategy(pl: Lightning, trainer: Any, module: Any) -> str | None:
    """Returns why the strategy's training step is left to Lightning, or ``None``."""
    strategy, strategies = trainer.strategy, pl.module("strategies")
    model = strategy.model
    if type(strategy) is strategies.DDPStrategy:
        if strategy.root_device.type != "cpu":
            return f"{trainer.world_size} processes with GPUs: gradients are synchronized by DDPStrategy"
        if strategy._model_averager is not None:
            return "DDPStrategy averages the models of all processes"
        model = model.module if type(model) is DistributedDataParallel else model
    elif type(strategy) is strategies.ModelParallelStrategy:
        if strategy.root_device.type != "cpu":
            return f"{trainer.world_size} processes with GPUs: parameters are sharded by ModelParallelStrategy"
    elif type(strategy) is not strategies.SingleDeviceStrategy:
        return f"strategy {type(strategy).__name__} has its own training step"
    return None if model is module else f"the model is wrapped in {type(strategy.model).__name__}"


def plain_scaler(precision: Any) -> bool:
    """Returns True for a precision plugin without a gradient scaler, or with one of torch's."""
    known = (type(None), torch.amp.GradScaler, torch.cuda.amp.GradScaler)
    return type(getattr(precision, "scaler", None)) in known


def ignores_argument(function: Any, position: int) -> bool:
    """Returns True if the code of a plain method never reads its argument ``position`` (0 is ``self``).

    Returns False for wrapped functions and for those that could read their variables in other ways.
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
    """Yields instructions on local variables; one that names two variables (3.13) yields two."""
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, tuple):
            yield from (SimpleNamespace(argval=name) for name in instruction.argval)
        elif "FAST" in instruction.opname:
            yield instruction


def _detached(value: Any) -> Any:
    """Returns ``value`` with every tensor in it detached from the autograd graph, which ends with the step."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_detached(item) for item in value])
    return value


def count(progress: Any, method: str) -> None:
    """Advances one of Lightning's progress counters, after the graph unless the step reads it."""
    getattr(progress, method)()


@registry.intercept(count)
def _count_after_step(world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    world.defer_change(count, args, "Lightning's count of zero_grad")


@dataclass
class Batch:
    """Properties of the batch, read only where needed, since both numbers change at every call.

    Attributes:
        epoch: ``trainer.current_epoch``.
        batch_idx: index of the batch.
        step_function: function of ``training_step`` before the step.
        unused: that function never reads its batch index and gets 0 instead.
    """

    epoch: int = 0
    batch_idx: int = 0
    step_function: Any = None
    unused: bool = False

    def begin(self, module: Any, epoch: int, batch_idx: int, kwargs: dict[str, Any]) -> None:
        """Sets the properties of a new batch; removes the index from the arguments if nothing reads it."""
        self.epoch, self.batch_idx = epoch, batch_idx
        training_step = module.training_step
        function = getattr(training_step, "__func__", training_step)
        if function is not self.step_function:
            self.step_function, self.unused = function, ignores_argument(training_step, 2)
        if self.unused and len(kwargs) == 2:
            kwargs["batch_idx"] = 0

    def complete(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inserts the index again if ``training_step`` was replaced during the step."""
        if self.unused and len(args) == 2:
            training_step = module.training_step
            if getattr(training_step, "__func__", training_step) is not self.step_function:
                return args[0], self.batch_idx
        return args


def automatic_step(pl: Lightning, trainer: Any, module: Any, batch: Batch) -> Callable[..., Any]:
    """Returns ``step(zero, update, *args)``: one batch of automatic optimization.

    Args of the step: whether gradients are zeroed first, whether the optimizer steps, and the arguments of
    ``training_step``. The step returns what Lightning passes to ``on_train_batch_end``. The caller counts the updates,
    as Lightning does.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    closure_class, call = pl.automatic.Closure, pl.module("trainer.call")
    base, without_reduction = pl.lightning_module, pl.module("loops.utilities")._block_parallel_sync_behavior

    def numbers(name: str) -> tuple[int, int]:
        """Returns epoch and batch index for a method; zeros for Lightning's own methods, which never read them."""
        if getattr(getattr(module, name), "__func__", None) is getattr(base, name):
            return 0, 0
        return batch.epoch, batch.batch_idx

    def training_step(args: tuple[Any, ...]) -> Any:
        return loop._training_step(dict(enumerate(batch.complete(module, args))))

    def zero_grad(optimizer: Any) -> None:
        progress = loop.optim_progress.optimizer.zero_grad
        count(progress, "increment_ready")
        call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)
        count(progress, "increment_started")
        name = "optimizer_zero_grad"
        call._call_lightning_module_hook(trainer, name, *numbers(name), optimizer)
        count(progress, "increment_completed")

    def sidefx_step(zero: bool, update: bool, *args: Any) -> dict[str, Any]:
        optimizer = trainer.optimizers[0]
        closure = closure_class(
            step_fn=partial(training_step, args),
            backward_fn=loop._make_backward_fn(optimizer),
            zero_grad_fn=partial(zero_grad, optimizer) if zero else None,
        )
        if update:
            wrapper, name = trainer.strategy._lightning_optimizers[0], "optimizer_step"
            call._call_lightning_module_hook(trainer, name, *numbers(name), wrapper, closure)
        else:
            with without_reduction(trainer.strategy, block=True):
                closure()
        result = closure.consume_result()
        if result.loss is None:
            return {}
        return {"loss": result.loss, **_detached(result.extra)}

    return sidefx_step


def manual_step(pl: Lightning, trainer: Any, module: Any, batch: Batch) -> Callable[..., Any]:
    """Returns ``step(*args)``: ``training_step`` with ``automatic_optimization=False``; returned tensors are
    detached."""
    call = pl.module("trainer.call")

    def sidefx_step(*args: Any) -> Any:
        output = call._call_strategy_hook(trainer, "training_step", *batch.complete(module, args))
        trainer.strategy.post_training_step()
        return _detached(output)

    return sidefx_step
