"""What docstrings list under "Args" and "Attributes" is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sidefx_train"
FILES = sorted(PACKAGE.rglob("*.py"))


def entries(docstring: str, section: str) -> Iterator[str]:
    """Names that a section lists."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", docstring + "\n", re.M)
    for names in re.findall(r"^    (\*{0,2}\w+(?:, \w+)*)(?: \([^)]*\))?: ", found[1] if found else "", re.M):
        yield from (name.lstrip("*") for name in names.split(", "))


def parameters(node: ast.AST) -> set[str]:
    """Names of the parameters of a function, or of a class's ``__init__``."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        return parameters(made[0]) if made else names_in(node)
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    given = node.args
    return {
        each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if each
    }


def names_in(node: ast.AST) -> set[str]:
    """Names that the code of a class mentions."""
    found: set[str] = set()
    for each in ast.walk(node):
        found |= {value for value in vars(each).values() if type(value) is str and value.isidentifier()}
        if isinstance(each, ast.Constant) and type(each.value) is str and each.value.isidentifier():
            found.add(each.value)
    return found


def unknown(source: str) -> list[str]:
    """Listed names that are no parameter or attribute."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            docstring = ast.get_docstring(node) or ""
            found += [f"{node.name}: {name}" for name in entries(docstring, "Args") if name not in parameters(node)]
            if isinstance(node, ast.ClassDef):
                listed = entries(docstring, "Attributes")
                found += [f"{node.name}: {name}" for name in listed if name not in names_in(node)]
    return found


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda path: path.name)
def test_docstrings_list_what_is_there(folder: Path) -> None:
    wrong = {file.name: found for file in folder.glob("*.py") if (found := unknown(file.read_text()))}
    assert not wrong, wrong


def test_a_wrong_name_is_found() -> None:
    text = (
        'class A:\n    """One.\n\n    Attributes:\n        here: one.\n        gone: two.\n    """\n\n    here: int\n'
    )
    assert unknown(text) == ["A: gone"]
