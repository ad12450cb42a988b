"""A compiled model: equal to the model in everything except its call.

``compile(net)`` returns an object of a subclass of the model's class, with the model's ``__dict__``: parameters,
buffers, children, hooks and attributes are the model's, read and written under the same names. Only its call is
compiled. The model itself is unchanged, and is ``self`` in ``forward`` and hooks.
"""

from __future__ import annotations

import abc
import copy
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.config import CompileConfig

if TYPE_CHECKING:
    from sidefx_train.compile.runtime.compiled_step import CompiledStep

_STEP, _MODEL = "_sidefx_step", "_sidefx_model"
_TYPE_OF: Any = vars(object)["__class__"]
_METHODS = frozenset({"report", "reset", "wait", "end", "dispatch_seconds", "prefetch", "config", "__wrapped__"})
"""Attributes of a compiled step that a compiled model has if the model has no attribute of that name."""


class CompiledModule:
    """Base of a compiled model's class, before the model's own."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Bypasses the model class's own hook, which may keep a list of subclasses."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._sidefx_step(*args, **kwargs)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(model_of(self), name)  # its class may have changed
        except AttributeError:
            if name in _METHODS:
                return getattr(step_of(self), name)
            raise

    @property
    def __class__(self) -> Any:
        """The model's class, which assignment changes (parametrizations do that)."""
        return type(model_of(self))

    @__class__.setter
    def __class__(self, cls: type) -> None:
        model_of(self).__class__ = cls
        _TYPE_OF.__set__(self, _class_for(cls))

    def __eq__(self, other: object) -> bool:
        """Makes the compiled model and the model equal, as keys of a dict or members of a set."""
        return other is self or model_of(other) is model_of(self)

    def __hash__(self) -> int:
        return hash(model_of(self))

    def __copy__(self) -> Any:
        return _like(copy.copy(model_of(self)), type(step_of(self)), step_of(self).config)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _like(copy.deepcopy(model_of(self), memo), type(step_of(self)), step_of(self).config)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _like, (model_of(self), type(step_of(self)), step_of(self).config)


class _WithStep(CompiledModule):
    """Provides storage for the step if the model's class has no slots, so that ``__class__`` can be assigned."""

    __slots__ = (_STEP, _MODEL)


@registry.intercept(CompiledModule.__call__)
def _call_in_capture(world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return world.interp.call(world.interp.getattr(args[0], _STEP), args[1:], kwargs)


def compiled_module(model: nn.Module, step: CompiledStep) -> Any:
    """Returns the compiled form of a model.

    Args:
        model: the model.
        step: the compiled step of the model.
    """
    made: Any = object.__new__(_class_for(type(model)))
    object.__setattr__(made, "__dict__", model.__dict__)
    object.__setattr__(made, _STEP, step)
    object.__setattr__(made, _MODEL, model)
    return made


def step_of(value: Any) -> Any:
    """Returns the compiled step of a compiled model; anything else unchanged."""
    return object.__getattribute__(value, _STEP) if isinstance(value, CompiledModule) else value


def model_of(value: Any) -> Any:
    """Returns the model of a compiled one; anything else unchanged."""
    return object.__getattribute__(value, _MODEL) if isinstance(value, CompiledModule) else value


_CLASSES: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _class_for(cls: type) -> type:
    """Returns the class of compiled models of a class; one for all of them."""
    known = _CLASSES.get(cls)
    made: type | None = None if known is None else known()
    if made is None:
        names = {
            "__slots__": (),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        meta: Any = type(cls)
        # Bypasses what a metaclass of the user does with new classes.
        new: Any = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
        try:
            made = new(meta, cls.__name__, (_WithStep, cls), names)
        except TypeError:  # the model's class has slots
            made = new(meta, cls.__name__, (CompiledModule, cls), {**names, "__slots__": (_STEP, _MODEL)})
        assert made is not None, f"a class derived from {cls.__qualname__}"
        _CLASSES[cls] = weakref.ref(made)
    return made


def _like(model: nn.Module, step_class: type, config: CompileConfig) -> Any:
    """Returns the compiled form of a model, with a step of its own."""
    return compiled_module(model, step_class(model, config))
