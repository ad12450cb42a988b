"""Breaks at every instruction of contexts, generator expressions and syntax that came after Python 3.11."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.breaks import check_every_instruction, continued
from tests.support.interpreter import bodies
from tests.support.newer_syntax import newer_bodies


def body_all_and_any() -> Any:
    numbers = [1, 2, 0]
    some = any(n > 1 for n in numbers), any(n > 9 for n in numbers)
    return all(n for n in numbers), some, tuple(2 * n for n in numbers), all(n < 9 for n in numbers)


def body_context_without_bound_methods() -> Any:
    class Context:
        @staticmethod
        def __enter__() -> int:
            return 5

        @classmethod
        def __exit__(cls, kind: Any, *rest: Any) -> bool:
            return kind is KeyError

    with Context() as n:
        raise KeyError(n)
    return n


def body_incomplete_context() -> Any:
    class Context:
        def __exit__(self, *error: Any) -> None:
            pass

    with Context():
        print("not reached")


NEWER = newer_bodies()
BREAKABLE = {name: NEWER[name] for name in ("body_type_parameters", "body_deferred_annotations") if name in NEWER}


@pytest.mark.parametrize("body", bodies({**globals(), **BREAKABLE}), ids=lambda body: body.__name__)
def test_stopped_at_every_instruction(body: Any) -> None:
    check_every_instruction(body, 200, share=0.1)


@pytest.mark.skipif("body_template_strings" not in NEWER, reason="this Python has no template strings")
def test_functions_with_template_strings_are_refused() -> None:
    """The assembler misreads the instruction that makes their fields."""
    outcome: list[str] = []
    continued(NEWER["body_template_strings"], 3, None, outcome)
    assert outcome == ["refused: cannot continue a function with a template string in the middle"]
