"""A self-contained HTML page with charts drawn as inline SVG: no scripts, nothing fetched."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 310, 62, 24, 26, 34

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { border: 1px solid #ccc; padding: .25rem .7rem; }
td:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
.sidefx-report td, .sidefx-report th { text-align: left; font-size: 13px; overflow-wrap: anywhere; }
pre { background: #f6f6f4; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
figure, section, details { margin: .5rem 0; overflow-x: auto; }
svg { width: 100%; min-width: 640px; height: auto; } text { font: 11px system-ui, sans-serif; fill: #555; }
"""

Points = Sequence[tuple[float, float]]


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, about ``count``, that hold all from ``low`` to ``high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda each: abs(math.log(each / rough)))
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [step * index for index in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten that hold all from ``low`` to ``high``; powers alone over many decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first < 4 else (1,)
    found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    begin = max(i for i, value in enumerate(found) if value <= low or i == 0)
    end = min(i for i, value in enumerate(found) if value >= high or i == len(found) - 1)
    return found[begin : max(end, begin + 1) + 1]


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def bands(values: Sequence[float], groups: int = 60) -> list[tuple[float, float, float, float]]:
    """(position, 10th, 50th and 90th percentile) of each group of neighbors; one slow step hides no others."""
    size = max(1, math.ceil(len(values) / groups), min(len(values) // 4, 10))
    found = []
    for first in range(0, len(values), size):
        part = sorted(values[first : first + size])
        low, middle, high = (part[max(0, math.ceil(q * len(part)) - 1)] for q in (0.1, 0.5, 0.9))
        found.append((first + (min(size, len(values) - first) - 1) / 2, low, middle, high))
    return found


def chart(
    title: str,
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    areas: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    logarithmic: bool = False,
) -> str:
    """Lines by name over a common x axis, as an SVG figure.

    Args:
        title: above it.
        series: points of each line.
        x_label: under the axis.
        y_label: above the axis.
        areas: (x, lowest, highest) around the line of the same name.
        logarithmic: the scale of positive y values.
    """
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    ys += [y for points in (areas or {}).values() for _, low, high in points for y in (low, high)]
    marks = _ticks(min(xs), max(max(xs), min(xs) + 1))
    scale = math.log if logarithmic else float
    levels = _decades(min(ys), max(ys)) if logarithmic else _ticks(min(ys), max(max(ys), min(ys) + 1e-6))
    x_low, x_high = marks[0], marks[-1]
    y_low, y_high = min(*ys, levels[0]), max(*ys, levels[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = TOP + (scale(y_high) - scale(y)) / (scale(y_high) - scale(y_low)) * (HEIGHT - BOTTOM - TOP)
        return across, down

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for value in levels:
        _, down = at(x_low, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}" stroke="#e4e4e0"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{_label(value)}</text>')
    for value in marks:
        across, _ = at(value, y_low)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_label(value)}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT}" y="11">{html.escape(y_label)}</text>')
    for index, (name, points) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        around = (areas or {}).get(name, ())
        if around:
            edge = [at(x, high) for x, _, high in around] + [at(x, low) for x, low, _ in reversed(around)]
            outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
            parts.append(f'<polygon points="{outline}" fill="{color}" opacity="0.2"/>')
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        width = 1.6 * (len(series) - index)  # a line under an equal one can be seen at its sides
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="{width}" opacity="0.85"/>')
        begin = LEFT + 110 + 130 * index
        parts.append(f'<rect x="{begin}" y="1" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{begin + 18}" y="11">{html.escape(name)}</text>')
    return f"<h2>{html.escape(title)}</h2><figure>" + "".join(parts) + "</svg></figure>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def text(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2><pre>{html.escape(body)}</pre>"


def write(path: Path, title: str, sections: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    path.write_text(f"{head}<style>{STYLE}</style><h1>{html.escape(title)}</h1>" + "\n".join(sections) + "</html>\n")
