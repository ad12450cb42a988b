"""The interpreter and the code that runs after a break need no torch: other Python versions are checked without it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = """
import importlib, pathlib, sys, types
sys.modules["torch"] = None
package = types.ModuleType("sidefx_train")
package.__path__ = [str(pathlib.Path.cwd() / "sidefx_train")]
sys.modules["sidefx_train"] = package
for file in sorted(pathlib.Path("tests/interpreter").glob("test_*.py")):
    if "tests.support.interpreter_compiled" not in file.read_text():
        importlib.import_module(f"tests.interpreter.{file.stem}")
"""


def test_interpreter_tests_import_no_torch():
    done = subprocess.run([sys.executable, "-c", SOURCE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
