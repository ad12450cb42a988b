"""Version counters of what kernels write that stand-ins have none of."""

from __future__ import annotations

from typing import Any

from sidefx_train import _torch_compat as compat


def count_lists(func: Any, args: tuple[Any, ...]) -> None:
    """Counts the writes of ``_foreach_add_`` and its kin: their kernels do so themselves, one for each tensor.

    The fused updates of optimizers (``_fused_adamw_``) are not counted in eager either.
    """
    if not func._schema.is_mutable or not func._schema.name.startswith("aten::_foreach_"):
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            compat.increment_version([written for written in value if not written.is_inference()])
