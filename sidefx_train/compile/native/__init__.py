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

__all__ = [
    "NARROW",
    "attention_module",
    "build_all",
    "cpu_description",
    "guards_if_stored",
    "guards_module",
    "guards_ready",
    "lstm_module",
    "native_module",
    "native_ready",
    "products_module",
    "rows_module",
    "start_build",
]
