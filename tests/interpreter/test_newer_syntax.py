"""Syntax that came after Python 3.11: in CPython and in the interpreter."""

import pytest

from tests.support.interpreter import bodies, check
from tests.support.newer_syntax import newer_bodies

globals().update(newer_bodies())


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
