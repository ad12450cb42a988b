"""A self-contained HTML page with line charts drawn as inline SVG: no scripts, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0")
WIDTH, HEIGHT, LEFT, BOTTOM = 860, 300, 62, 34

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { border: 1px solid #ccc; padding: .25rem .7rem; }
td:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f4; padding: 1rem; overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; } text { font: 11px system-ui, sans-serif; fill: #555; }
"""

Points = Sequence[tuple[float, float]]


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    return [low + (high - low) * index / (count - 1) for index in range(count)]


def chart(title: str, series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Lines by name over a common x axis, as an SVG figure."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-9)
    y_low, y_high = min(ys), max(max(ys), min(ys) + 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - 10)
        down = 10 + (y_high - y) / (y_high - y_low) * (HEIGHT - BOTTOM - 10)
        return across, down

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for value in _ticks(y_low, y_high):
        _, down = at(x_low, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{down:.1f}" y2="{down:.1f}" stroke="#e4e4e0"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for value in _ticks(x_low, x_high):
        across, _ = at(value, y_low)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:.0f}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT}" y="9">{html.escape(y_label)}</text>')
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6" opacity="0.85"/>')
        parts.append(f'<rect x="{WIDTH - 150}" y="{14 + 18 * index}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - 132}" y="{24 + 18 * index}">{html.escape(name)}</text>')
    return f"<h2>{html.escape(title)}</h2>" + "".join(parts) + "</svg>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def text(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2><pre>{html.escape(body)}</pre>"


def write(path: Path, title: str, sections: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    path.write_text(f"{head}<style>{STYLE}</style><h1>{html.escape(title)}</h1>" + "\n".join(sections) + "</html>\n")
