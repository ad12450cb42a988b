"""Rebuilds instances of classes, exceptions, modules and weak references that the step created."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from torch.backends.cuda import SDPAParams

from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static
from sidefx_train.compile.capture.shadows.objects.outside_exceptions import CHAIN, fields_of
from sidefx_train.compile.capture.shadows.objects.weak_references import ShadowRef
from sidefx_train.compile.common.plain_values import DERIVED_FROM, exact_value
from sidefx_train.compile.common.type_checks import safe_isinstance, set_field
from sidefx_train.compile.residual.reconstruct.attributes import fill_attributes
from sidefx_train.compile.residual.reconstruct.deferred import call
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction


def new_instance(rebuilder: Reconstruction, value: Any) -> str:
    """Returns an instance of a class, created without ``__init__``; its attributes are filled in later."""
    cls = type(value)
    base = next(base for base in cls.__mro__ if is_static(base))
    name = rebuilder.writer.fresh("n")
    made = f"{rebuilder.constant(base.__new__, 'new_object')}({rebuilder.constant(cls)}"
    if base is object and not _is_made_by_object(cls):
        rebuilder.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
    if base is object or base is types.SimpleNamespace:
        made += ")"
    elif base in DERIVED_FROM:
        made += f", {rebuilder.constant(exact_value(value))})"
    elif issubclass(base, BaseException):
        made += "".join(f", {item}" for item in _arguments(rebuilder, value)) + ")"
    else:
        rebuilder.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
    if cls.__module__ == "builtins" and not issubclass(base, BaseException):
        rebuilder.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
    rebuilder.named(value, name)
    rebuilder.write(f"{name} = {made}")
    if safe_isinstance(value, BaseException):
        rebuilder.fill(functools.partial(_fill_exception, rebuilder, name, value))
    rebuilder.fill(functools.partial(fill_attributes, rebuilder, name, value))
    return name


def _arguments(rebuilder: Reconstruction, error: BaseException) -> list[str]:
    """Returns what an exception is made with."""
    with rebuilder.reading():
        return [rebuilder.expression(item) for item in error.args]


def _fill_exception(rebuilder: Reconstruction, name: str, error: BaseException) -> None:
    """Sets what an exception records about how it was raised."""
    for field in (*CHAIN, "__suppress_context__", *fields_of(type(error))):
        value = getattr(error, field)
        if value is not None and value is not False:
            rebuilder.write(f"{rebuilder.constant(set_field)}({name}, {field!r}, {rebuilder.expression(value)})")
    if error.__traceback__ is not None:
        trace = rebuilder.constant(error.__traceback__, "traceback")
        rebuilder.write(f"{rebuilder.constant(set_field)}({name}, '__traceback__', {trace})")


def weak_reference(rebuilder: Reconstruction, value: Any) -> str:
    target = value()
    if target is None:
        return rebuilder.constant(value, "dead_reference")
    maker = rebuilder.constant(weakref.ref, "ref")
    with rebuilder.constructing():
        parts = [rebuilder.expression(target)]
        if safe_isinstance(value, ShadowRef):
            parts.append(rebuilder.expression(value.callback))
        return rebuilder.remember(value, f"{maker}({', '.join(parts)})")


def new_module(rebuilder: Reconstruction, value: types.ModuleType) -> str:
    maker = rebuilder.constant(types.ModuleType.__new__, "new_module")
    made = rebuilder.remember(value, f"{maker}({rebuilder.constant(type(value))})")
    rebuilder.fill(functools.partial(fill_attributes, rebuilder, made, value))
    return made


_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout", "is_causal", "enable_gqa")
"""What attention is called with, in the order of the arguments of ``SDPAParams``."""


def new_attention_arguments(rebuilder: Reconstruction, value: SDPAParams) -> str:
    with rebuilder.constructing():
        given = ", ".join(rebuilder.expression(getattr(value, name)) for name in _OF_ATTENTION)
        return rebuilder.remember(value, f"{rebuilder.constant(SDPAParams)}({given})")


def new_date(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a date, time or duration, made from its pickle arguments."""
    maker, parts = value.__reduce_ex__(2)
    return rebuilder.remember(value, call(rebuilder, maker, parts, {}))


def _is_made_by_object(cls: type) -> bool:
    """Returns True if ``object.__new__`` creates instances of ``cls``; C classes may look like Python classes."""
    own = (vars(base).get("__new__") for base in cls.__mro__)
    makers = (made.__self__ for made in own if safe_isinstance(made, types.BuiltinFunctionType))
    if next(maker for maker in makers if safe_isinstance(maker, type)) is not object:
        return False
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True
