"""The Python blocks of the documents run: those of a page after each other, in one namespace.

A block behind a comment ``<!-- not run: why -->`` is left out.
"""

from __future__ import annotations

import linecache
import re
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")


def _blocks(page: Path) -> list[tuple[int, str]]:
    """First line and text of each ``python`` block that runs."""
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    linecache.checkcache(str(page))
    module = types.ModuleType(f"docs_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    state = torch.random.get_rng_state()
    try:
        for line, source in _blocks(page):
            # Errors and reports name the line of the page.
            exec(compile("\n" * line + source, str(page), "exec"), vars(module))
    finally:
        torch.random.set_rng_state(state)
