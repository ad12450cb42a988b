"""The layers of the package: allowed imports, type-checking imports included, and the file of each unit test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sidefx_train"

FLOORS = (
    ("bench", "__main__"),
    ("doctor",),
    ("__init__",),
    ("fit",),
    ("callbacks",),
    ("compile",),
    ("compile/gpu/simulation",),
    ("compile/runtime",),
    ("compile/pipeline",),
    ("compile/autograd",),
    ("compile/residual", "compile/backend"),
    ("compile/gpu",),
    ("compile/functionalization", "compile/distributed", "hooks", "optim"),
    ("compile/capture",),
    ("compile/graph", "compile/native", "compile/ops"),
    ("compile/common", "report_ranks"),
    ("torch_compat", "disk_cache", "report", "config"),
    ("errors", "switches", "gc_control", "communication"),
)
"""Top to bottom: every import leads to a lower line. Files at the top of the package are entries of their own."""

INSIDE = {
    "compile/capture": (
        ("interceptors",),
        ("world",),
        ("side_effects",),
        ("shadows",),
        ("recording",),
        ("resume",),
        ("guards",),
        ("interpreter",),
    ),
    "compile/backend": (("",), ("cpp_codegen", "verification"), ("runners", "autotune"), ("passes",)),
    "torch_compat": (("inductor",), ("fakes", "distributed", "overrides"), ("",), ("state",)),
}
"""The same for the subfolders of a folder; ``""`` is the files directly in the folder."""


def modules() -> dict[str, Path]:
    """Returns every file of the package by its dotted name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(module: str) -> Iterator[str]:
    """Yields the modules of the package that a module imports anywhere in its text."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sidefx_train":
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns one path for each cycle that a depth-first search closes."""
    state, path, found = dict.fromkeys(edges, "new"), [], []

    def visit(node: str) -> None:
        state[node] = "open"
        path.append(node)
        for following in sorted(edges[node]):
            if state[following] == "open":
                found.append([*path[path.index(following) :], following])
            elif state[following] == "new":
                visit(following)
        path.pop()
        state[node] = "done"

    for node in edges:
        if state[node] == "new":
            visit(node)
    return found


def test_no_file_is_imported_in_a_circle():
    edges = {module: set(imports(module)) - {module} for module in MODULES}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]], "the search finds none"
    found = cycles(edges)
    assert not found, "\n".join(" -> ".join(path) for path in found)


def room(module: str) -> str:
    """Returns a module's entry in :data:`FLOORS`."""
    place = "/".join(module.split(".")[1:])
    known = {name for floor in FLOORS for name in floor}
    if place in ("", "compile"):
        return place or "__init__"
    for end in range(len(place.split("/")), 0, -1):
        prefix = "/".join(place.split("/")[:end])
        if prefix in known and (prefix != "compile" or end == len(place.split("/")) - 1):
            return prefix
    raise AssertionError(f"{module} has no place among the layers")


def test_every_import_leads_down():
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    wrong = []
    for module in MODULES:
        here = room(module)
        for other in set(imports(module)):
            there = room(other)
            if here != there and level[there] <= level[here]:
                wrong.append(f"{module} imports {other}: {here} is not above {there}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", INSIDE)
def test_every_import_inside_a_folder_leads_down(folder):
    floors = INSIDE[folder]
    level = {name: number for number, floor in enumerate(floors) for name in floor}
    prefix, wrong = "sidefx_train." + folder.replace("/", "."), []

    def part(module: str) -> str:
        place = MODULES[module].relative_to(PACKAGE / folder).parts
        return place[0] if len(place) > 1 else ""

    for module in MODULES:
        if not (module == prefix or module.startswith(prefix + ".")) or module == prefix:
            continue
        for other in set(imports(module)):
            if not other.startswith(prefix + "."):
                continue
            here, there = part(module), part(other)
            if here != there and level[there] <= level[here]:
                wrong.append(f"{module} imports {other}: {here} is not above {there}")
    assert not wrong, "\n".join(wrong)


def test_every_package_says_its_job_and_holds_few_files():
    for init in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init.relative_to(ROOT)} says nothing of its job"
        files = list(init.parent.glob("*.py"))
        assert len(files) <= 16, f"{init.parent.relative_to(ROOT)} holds {len(files)} files"


def test_unit_tests_stand_where_the_package_has_a_folder():
    for folder in (ROOT / "tests/unit").rglob("*"):
        if folder.is_dir() and folder.name != "__pycache__":
            place = folder.relative_to(ROOT / "tests/unit")
            there = PACKAGE / place if (PACKAGE / place).is_dir() else PACKAGE / "compile" / place
            assert there.is_dir(), f"tests/unit/{place} is about no folder of the package"
