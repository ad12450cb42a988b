"""Fills what objects hold beside their contents: the instance ``__dict__`` and slots."""

from __future__ import annotations

from typing import Any

from sidefx_train.compile.capture.shadows.containers.instance_dicts import check_hidden_dict
from sidefx_train.compile.common.plain_values import instance_dict_of_plain, is_set, slot_names
from sidefx_train.compile.common.type_checks import shows_another
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction


def fill_attributes(rebuilder: Reconstruction, name: str, value: Any) -> None:
    """Fills the instance ``__dict__`` and the slots of a new object."""
    if shows_another(type(value)):
        check_hidden_dict(rebuilder.world.heap, value)
    items = instance_dict_of_plain(value)
    if rebuilder.world.heap.record_of(items) is not None:  # of an outside object, or shared by all instances
        rebuilder.write(f"object.__setattr__({name}, '__dict__', {rebuilder.expression(items)})")
    elif items:
        space = rebuilder.writer.fresh("d")
        rebuilder.write(f"{space} = object.__getattribute__({name}, '__dict__')")
        for key, item in items.items():
            rebuilder.write(f"{space}[{rebuilder.constant(key)}] = {rebuilder.expression(item)}")
    for slot in slot_names(type(value)):
        if is_set(value, slot):
            item = rebuilder.expression(object.__getattribute__(value, slot))
            rebuilder.write(f"object.__setattr__({name}, {rebuilder.constant(slot)}, {item})")
