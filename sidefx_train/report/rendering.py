"""Renders tables as text (with ``rich``) and as HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

SHOWN = 12
"""Rows of one table in a printed report; HTML and ``to_dict`` contain all rows."""


@dataclass(frozen=True)
class Block:
    """One table.

    Attributes:
        title: heading of the table.
        columns: column names.
        rows: one string per column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_text(title: str, figures: str, blocks: Sequence[Block]) -> RenderableType:
    """Returns a line with a bold title followed by tables, for ``rich``."""
    return Group(Text.assemble((title, "bold"), " ", figures), *map(table, blocks))


def plain(shown: RenderableType) -> str:
    """Renders as text without colors."""
    stream = io.StringIO()
    Console(file=stream, width=120, color_system=None, force_terminal=False).print(shown)
    return stream.getvalue().rstrip()


def as_html(title: str, figures: str, blocks: Sequence[Block], folded: Sequence[Block]) -> str:
    """Returns the same as a ``<section>``; tables of ``folded`` open on a click."""
    shown = "".join(_html_table(block, block.title) for block in blocks)
    hidden = "".join(
        f"<details><summary>{html.escape(block.title)}</summary>{_html_table(block)}</details>" for block in folded
    )
    head = f"<p><strong>{html.escape(title)}</strong> {html.escape(figures)}</p>"
    return f'<section class="sidefx-report">{head}{shown}{hidden}</section>'


def table(block: Block) -> Table:
    table = Table(title=block.title, title_justify="left", title_style="bold")
    for column in block.columns:
        table.add_column(column, overflow="fold")
    for row in block.rows[:SHOWN]:
        table.add_row(*(Text(cell) for cell in row))
    if len(block.rows) > SHOWN:
        more = Text(f"... {len(block.rows) - SHOWN} more in to_dict()")
        table.add_row(more, *[""] * (len(block.columns) - 1))
    return table


def _html_table(block: Block, caption: str = "") -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(line(row, "td") for row in block.rows)
    return f"<table>{head}<thead>{line(block.columns, 'th')}</thead><tbody>{body}</tbody></table>"
