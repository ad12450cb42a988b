"""Runs the bodies of the interpreter's tests a third way: in captured steps, without falling back to eager Python."""

from __future__ import annotations

import pytest

from tests.interpreter import all_bodies

pytest.importorskip("torch")

from tests.support.interpreter_compiled import check_compiled, check_refused  # noqa: E402

REFUSED = {
    "body_subclass_of_builtins": "SFX111",  # the step returns instances of a class that it defines
    "body_container_subclass_with_attributes": "SFX111",
    "body_dict_missing_and_default": "SFX111",
    "body_del_method": "SFX104",  # a replay would not create the deleted object
    "body_format_exc": "SFX103",  # reads source files
}
"""Bodies that are not captured, with the code of the reason."""

BODIES = {body.__name__: body for body in all_bodies.BODIES}


@pytest.mark.parametrize("name", [name for name in BODIES if name not in REFUSED])
def test_captured(name):
    check_compiled(BODIES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check_refused(lambda: (BODIES[name], None), REFUSED[name])
