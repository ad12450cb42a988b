"""Models with gradient reduction between processes: a step that uses one runs eagerly as a whole.

They communicate in the backward, by C++ hooks or classes of torch. A captured backward would skip that, and ranks would
diverge. What is captured of ``DistributedDataParallel`` and ``fully_shard`` is in ``compile/distributed``.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import instance_dict, safe_isinstance
from sidefx_train.errors import Location, Unsupported

CODE = "SFX121"
_MODULES = (("torch.distributed.fsdp", "FullyShardedDataParallel"),)
"""Classes of modules with their torch modules; looked up if those are imported."""
_TENSORS = (("torch.distributed.tensor", "DTensor"),)


def refuse_if_distributed(value: Any, label: str, location: Location | None) -> None:
    """Stops the capture, and any in parts, if a value takes part in distributed communication.

    Args:
        value: a module, or a tensor of another class than torch's own.
        label: source of the value.
        location: the user's line.

    Raises:
        Unsupported: it takes part.
    """
    kind = _kind(value)
    if not kind:
        return
    refuse_whole(CODE, f"{label} is {kind}, whose gradients are reduced between processes in the backward", location)


def refuse_dtensor(which: str, label: str, location: Location | None) -> NoReturn:
    """Stops the capture, and any in parts, at a ``DTensor`` that is not captured.

    Raises:
        Unsupported: always.
    """
    refuse_whole(CODE, f"{label} is a DTensor {which}", location)


def refuse_whole(code: str, reason: str, location: Location | None) -> NoReturn:
    """Stops the capture, and any in parts.

    Raises:
        Unsupported: always.
    """
    stop = Unsupported(code, reason, location)
    stop.whole = True
    raise stop


def _kind(value: Any) -> str:
    if safe_isinstance(value, torch.Tensor):
        return "a DTensor" if safe_isinstance(value, _imported(_TENSORS)) else ""
    found = next((cls for cls in _imported(_MODULES) if safe_isinstance(value, cls)), None)
    if found is not None:
        return f"a {found.__name__}"
    if type(value) is getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None):
        return ""  # its forward decides (compile/distributed/data_parallel.py)
    reducer = compat.gradient_reducer()
    if reducer is not None and any(safe_isinstance(held, reducer) for held in instance_dict(value).values()):
        return f"a {type(value).__name__} with a Reducer of torch's"
    return ""


def _imported(names: tuple[tuple[str, str], ...]) -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(cls for cls in found if cls is not None)
