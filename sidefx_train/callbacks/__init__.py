"""Integrations with training frameworks."""

from sidefx_train.callbacks.lightning import SideFXCompile

__all__ = ["SideFXCompile"]
