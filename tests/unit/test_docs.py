"""Documentation and code say the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import sidefx_train
from sidefx_train.errors import CODES

ROOT = Path(__file__).parents[2]


def test_every_code_has_its_section():
    """Same codes, same titles, same order."""
    text = (ROOT / "docs/breaks.md").read_text()
    sections = dict(re.findall(r"^### (SFX\d+): (.+)$", text, flags=re.MULTILINE))
    assert sections == {code: title for code, (title, _) in CODES.items()}, "docs/breaks.md and errors.CODES differ"
    assert list(sections) == list(CODES), "docs/breaks.md lists the codes in another order"


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_files_named_in_the_architecture_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    for name in set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text)):
        places = [ROOT / name, ROOT / "sidefx_train" / name]
        assert any(place.exists() for place in places), f"docs/architecture.md names {name}, which is not there"


def test_readme_lists_the_options_of_compile():
    from sidefx_train.compile.api import compile_step

    options = set(inspect.signature(compile_step).parameters) - {"fn"}
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert listed == options, f"README lists {sorted(listed)}, compile takes {sorted(options)}"


def test_public_names():
    for name in sidefx_train.__all__:
        assert getattr(sidefx_train, name) is not None, f"{name} cannot be imported"


def test_private_torch_names_live_in_one_folder():
    for file in (ROOT / "sidefx_train").rglob("*.py"):
        if "torch_compat" in file.relative_to(ROOT / "sidefx_train").parts[:1]:
            continue
        code = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
        found = re.findall(r"(?:^|[^\w`\"'])(torch\._[A-Za-z]\w*|from torch\._\w+)", code)
        assert not found, f"{file.relative_to(ROOT)} uses {found}"
