"""Runs the Python blocks of the documents: those of a page one after the other, in one namespace.

A block after a comment ``<!-- not run: why -->`` is skipped.
"""

from __future__ import annotations

import linecache
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from sidefx_train.compile.native import guards_module

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")


def _blocks(page: Path) -> list[tuple[int, str]]:
    """Returns first line and text of each ``python`` block that runs."""
    text = page.read_text()
    blocks = []
    for found in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        before = text[: found.start()]
        if not NOT_RUN.search(before):
            blocks.append((before.count("\n") + 1, found[1]))
    return blocks


PAGES = [page for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]) if _blocks(page)]


def test_few_blocks_are_not_run():
    text = "".join(page.read_text() for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    assert text.count("<!-- not run:") <= 4, "blocks of code that nothing runs: make them run"


def _run(page: Path, monkeypatch) -> dict:
    """Runs the blocks of a page; returns their namespace. Errors and reports name the line of the page."""
    linecache.checkcache(str(page))
    module = types.ModuleType(f"docs_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    state = torch.random.get_rng_state()
    try:
        for line, source in _blocks(page):
            exec(compile("\n" * line + source, str(page), "exec"), vars(module))
    finally:
        torch.random.set_rng_state(state)
    return vars(module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    guards_module()  # until it is built, models live as long as their step
    monkeypatch.chdir(tmp_path)
    _run(page, monkeypatch)


def _without_names(line: str) -> str:
    """Returns a generated line without the parts that depend on names, numbers and options."""
    return re.sub(r"\d+|__\w+__|docs_\w+?(?=[._])|main|\s|, pin_memory.*?(?=\))|;.*", "", line)


def test_the_overview_shows_what_is_generated(tmp_path, monkeypatch):
    """Every line of its two listings, in order, except for omitted lines."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/internals/overview.md"
    sources = _run(page, monkeypatch)["sources"]
    for name, first in (("graph", "def forward"), ("residual", "def replay")):
        (listing,) = re.findall(rf"^```\n({first}.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        generated = iter([_without_names(line) for line in sources[name].splitlines()])
        for line in listing.splitlines():
            if line.strip() != "...":
                assert _without_names(line) in generated, f"docs/internals/overview.md: {line.strip()} is not generated"
