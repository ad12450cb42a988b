"""Small C++ modules used with generated code: kernels, optimizer updates, index checks, guards on held objects."""

from sidefx_train.compile.native.build import (
    attention_module,
    build_all,
    cpu_description,
    guards_if_stored,
    guards_module,
    guards_ready,
    lstm_module,
    native_module,
    native_ready,
    products_module,
    rows_module,
    start_build,
)
from sidefx_train.compile.native.matmul_kernel import NARROW
from sidefx_train.compile.native.set_many import increment_versions, set_gradients, set_versions

__all__ = [
    "NARROW",
    "attention_module",
    "build_all",
    "cpu_description",
    "guards_if_stored",
    "guards_module",
    "guards_ready",
    "increment_versions",
    "lstm_module",
    "native_module",
    "native_ready",
    "products_module",
    "rows_module",
    "set_gradients",
    "set_versions",
    "start_build",
]
