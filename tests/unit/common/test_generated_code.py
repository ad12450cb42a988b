"""Generated source in tracebacks."""

from __future__ import annotations

import linecache
import traceback

from sidefx_train.compile.common.generated_code import compile_function, forget_source


def test_tracebacks_show_the_source_until_it_is_forgotten():
    file = "<sidefx_train test of generated code>"
    source = "def run(x):\n    return x / zero  # generated\n"
    run = compile_function("run", source, {"zero": 0}, file)
    for shown in (True, False):
        try:
            run(1)
        except ZeroDivisionError as error:
            text = "".join(traceback.format_exception(error))
        assert file in text and ("# generated" in text) is shown
        forget_source(file)
    assert file not in linecache.cache
