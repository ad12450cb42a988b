"""Checks that documentation and code agree."""

from __future__ import annotations

import inspect
import pkgutil
import re
import typing
from pathlib import Path

import pytest

import sidefx_train
from sidefx_train.errors import CODES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
"""All documents, including the changelog."""

INTERNALS = sorted((ROOT / "docs/internals").glob("*.md"))


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _without_code(text: str) -> str:
    """Returns a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_code_has_its_section():
    """Checks for the same codes, titles and order."""
    text = (ROOT / "docs/graph-breaks.md").read_text()
    sections = dict(re.findall(r"^### (SFX\d+): (.+)$", text, flags=re.MULTILINE))
    assert sections == {code: title for code, (title, _) in CODES.items()}, (
        "docs/graph-breaks.md and errors.CODES differ"
    )
    assert list(sections) == list(CODES), "docs/graph-breaks.md lists the codes in another order"


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,3} (.+)$", _without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", _without_code(page.read_text())):
        file = page.parent / target if target else page
        assert file.exists(), f"{_name(page)} links to {target}, which does not exist"
        assert not anchor or anchor in _anchors(file), f"{_name(page)} links to {target}#{anchor}: no such heading"


PATHS = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("sidefx_train", "tests", "docs", "examples")
    for path in (ROOT / folder).rglob("*")
    if "__pycache__" not in path.parts
] + [f"/{path.name}" for path in ROOT.iterdir()]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_named_in_the_documents_exist(page):
    """A document names a file or folder by the end of its path: ``guards/guard.py``, ``tests/fuzz/``."""
    for name in sorted(set(re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|md|toml|txt)|(?:[\w.]+/)+)`", page.read_text()))):
        end = f"/{name.rstrip('/')}"
        assert any(path.endswith(end) for path in PATHS), f"{_name(page)} names {name}, which does not exist"


def _options() -> set[str]:
    from sidefx_train.compile.api import compile_step

    return set(inspect.signature(compile_step).parameters) - {"fn"}


def test_the_page_of_options_lists_those_of_compile():
    """Includes the default values."""
    from sidefx_train.config import CompileConfig

    rows = re.findall(r"^\| `(\w+)` \| .+? \| `([^`]+)` \|", (ROOT / "docs/options.md").read_text(), flags=re.MULTILINE)
    assert {name for name, _ in rows} == _options(), "docs/options.md and the parameters of compile differ"
    defaults = {
        name: repr(field.default).replace("'", '"') for name, field in CompileConfig.__dataclass_fields__.items()
    }
    assert dict(rows) == defaults, "docs/options.md shows other defaults than config.CompileConfig has"


def test_the_page_of_options_lists_the_environment_variables():
    page = (ROOT / "docs/options.md").read_text()
    read = set()
    for file in (ROOT / "sidefx_train").rglob("*.py"):
        read |= set(re.findall(r"environ\.get\(\s*\"(SIDEFX_\w+)\"", file.read_text()))
    assert len(read) >= 3, "environment variables are no longer found by this test"
    assert not [name for name in read if f"`{name}`" not in page], "docs/options.md lacks environment variables"


def test_public_names():
    for name in sidefx_train.__all__:
        assert getattr(sidefx_train, name) is not None, f"{name} cannot be imported"


def test_the_api_page_has_the_public_names():
    page = (ROOT / "docs/api.md").read_text()
    missing = [name for name in sidefx_train.__all__ if f"sidefx_train.{name}" not in page]
    assert not missing, f"docs/api.md lacks {missing}"
    targets = re.findall(
        r"^\.\. (?:public-function:: \S+|autoclass::|automodule::) ([\w.]+)$", page, flags=re.MULTILINE
    )
    assert len(targets) >= 15, "what docs/api.md documents is no longer found by this test"
    for target in targets:
        assert pkgutil.resolve_name(target) is not None


def test_pages_are_short():
    for page in INTERNALS:
        lines = len(page.read_text().splitlines())
        assert lines <= 150, f"{_name(page)} has {lines} lines; split it, or write less"
    assert len((ROOT / "README.md").read_text().splitlines()) < 120, "README.md is too long"


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs/index.md").read_text()
    listed = {
        line.strip()
        for block in re.findall(r"```{toctree}(.*?)```", index, flags=re.DOTALL)
        for line in block.splitlines()
    }
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index"} <= listed, f"docs/index.md does not list {sorted(pages - {'index'} - listed)}"


PRIVATE_WORDS = re.compile(
    r"\b(anew|stand-ins?|tell(?:s|ing)? apart|told apart|(?:taken|takes?|taking) for granted|given memory"
    r"|gives? (?:other )?memory|led back|beside the training)\b",
    flags=re.IGNORECASE,
)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_documents_use_the_words_of_the_field(page):
    """``docs/internals/glossary.md`` lists the words; it may quote the others."""
    if page.name == "glossary.md":
        return
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        found = PRIVATE_WORDS.search(line)
        assert not found, f"{_name(page)}:{number} says {found[0]!r}; docs/internals/glossary.md has the field's word"


INTERNAL = {"AssumptionFailed", "Unsupported"}
"""Errors that no user sees."""


def _public(module) -> list:
    """Returns the public definitions of a module."""
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__ and name not in INTERNAL
    ]


def test_docstrings_of_public_names_use_them_too():
    """They are part of the API page."""
    from sidefx_train import config, disk_cache, switches
    from sidefx_train.compile import api
    from sidefx_train.fit import loop
    from sidefx_train.report import records, step_report

    modules = (config, disk_cache, records, step_report, switches, sidefx_train.errors, api, loop)
    public = [value for module in modules for value in _public(module)]
    public += [sidefx_train.CompiledStep, sidefx_train.SideFXCompile]
    members = [member for cls in public if inspect.isclass(cls) for name, member in vars(cls).items() if name[0] != "_"]
    assert len(public) > 20, "public names are no longer found by this test"
    for value in [*public, *members]:
        found = PRIVATE_WORDS.search(inspect.getdoc(value) or "")
        assert not found, f"docstring of {value} says {found[0]!r}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_lines_are_no_longer_than_those_of_code(page):
    for number, line in enumerate(_without_code(page.read_text()).splitlines(), start=1):
        allowed = line.lstrip().startswith("|") or "](" in line
        assert allowed or len(line) <= 140, f"{_name(page)}: line {number} outside code has {len(line)} characters"


def test_private_torch_names_live_in_one_folder():
    for file in (ROOT / "sidefx_train").rglob("*.py"):
        if "torch_compat" in file.relative_to(ROOT / "sidefx_train").parts[:1]:
            continue
        code = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
        found = re.findall(r"(?:^|[^\w`\"'])(torch\._[A-Za-z]\w*|from torch\._\w+)", code)
        assert not found, f"{file.relative_to(ROOT)} uses {found}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/internals/where-to-look.md"])
def test_recipes_and_answers_name_what_exists(page):
    """`name` in `file`: a definition or an assignment at the top level of that file, or a method in it."""
    text = " ".join((ROOT / page).read_text().split())
    named = re.findall(r"`(\w+)` in `([\w./]+\.py)`", text)
    assert len(named) >= 15, f"{page} names files and functions"
    for name, end in named:
        (file,) = [path for path in (ROOT / "sidefx_train").rglob("*.py") if str(path).endswith(f"/{end}")]
        defined = re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b.*=", file.read_text(), flags=re.MULTILINE)
        assert defined, f"{page}: {end} has no {name}"


def _lacks(page: str, names) -> list[str]:
    text = (ROOT / "docs/internals" / page).read_text()
    return [name for name in names if f"`{name}`" not in text]


def test_internals_name_all_guard_kinds():
    from sidefx_train.compile.capture.guards.guard import GuardKind

    assert not _lacks("guards.md", typing.get_args(GuardKind))


def test_internals_name_all_passes_and_repairs():
    from sidefx_train import switches
    from sidefx_train.compile.backend.pass_list import PASSES

    assert not _lacks("backends.md", [*switches.GRAPH, *(each.name for each in PASSES)])
    assert not _lacks("torch-compat.md", switches.CORRECTNESS)
