"""Sphinx: the documentation as HTML, made by ``make docs``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.parsing import nested_parse_to_nodes

import sidefx_train
from sidefx_train import switches

project = "SideFX Train"
copyright = "the SideFX Train authors"
release = version = sidefx_train.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_use_rtype = False
nitpicky = True
# Other libraries' names cannot be looked up: documentation is made without a network.
nitpick_ignore_regex = [
    ("py:.*", r"(?!sidefx_train).*"),
    ("py:.*", r"sidefx_train\.(compile|config|report|fit|callbacks|disk_cache)\..*"),
]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_title = f"SideFX Train {version}"
html_copy_source = False
html_show_sphinx = False


class PublicFunction(SphinxDirective):
    """``public-function:: public.name import.path``: documents a function under the name that users call it by."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        name, path = self.arguments
        module, _, attribute = path.rpartition(".")
        function: Any = getattr(importlib.import_module(module), attribute)
        text = GoogleDocstring(inspect.getdoc(function) or "", self.config, what="function", name=name).lines()
        signature = inspect.signature(function)
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        head = f".. py:function:: {name}{inspect.Signature(plain)}"
        lines = [head, "", *(f"   {line}" for line in text)]
        return nested_parse_to_nodes(self.state, StringList(lines, source=path))


class SwitchTables(SphinxDirective):
    """``switch-tables::``: one table for each group of switches."""

    def run(self) -> list[nodes.Node]:
        said = ModuleAnalyzer.for_module(switches.__name__).find_attr_docs()
        lines: list[str] = []
        for group in ("GRAPH", "COMPILE_TIME", "CORRECTNESS", "CODEGEN"):
            lines += ["", f"``{group}``: {' '.join(said['', group])}", "", ".. list-table::", "   :widths: 1 3", ""]
            for name, effect in getattr(switches, group).items():
                lines += [f"   * - ``{name}``", f"     - {effect}"]
        return nested_parse_to_nodes(self.state, StringList(lines, source=switches.__file__))


def without_signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """Drops the signatures of records and errors, which users read and do not create."""
    created_inside = what == "exception" or "<factory>" in (signature or "") or name.endswith("Record")
    return ("", "") if signature and created_inside else None


def setup(app: Sphinx) -> None:
    app.add_directive("public-function", PublicFunction)
    app.add_directive("switch-tables", SwitchTables)
    app.connect("autodoc-process-signature", without_signature)
