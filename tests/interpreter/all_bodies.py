"""The bodies of all test files that compare the interpreter with CPython, to be run in other ways."""

from __future__ import annotations

from importlib import import_module

from tests.support.interpreter import bodies

NAMES = (
    "test_attributes",
    "test_calls",
    "test_classes",
    "test_containers",
    "test_dataclasses_and_enums",
    "test_descriptors",
    "test_exceptions",
    "test_formatting",
    "test_generators",
    "test_iterators_and_builtins",
    "test_loops_and_comprehensions",
    "test_match",
    "test_metaclasses",
    "test_newer_syntax",
    "test_operators",
    "test_scopes",
    "test_with",
)
MODULES = [import_module(f"tests.interpreter.{name}") for name in NAMES]
BODIES = [body for module in MODULES for body in bodies(vars(module))]
