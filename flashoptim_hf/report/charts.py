"""Line charts as SVG text, drawn for light and dark pages: colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 66, 24, 10, 30
MOST_POINTS = 600
"""Points drawn of one line; longer lines are drawn through the lowest and the highest value of each stretch."""

MOST_MARKS = 60
"""Up to so many points of a line carry a mark that shows its value when it is pointed at."""

FINEST = 1e-290
"""What lies nearer to each other than this is one value: steps between ticks would lose their digits."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line of a chart. `points`: (step, value), finite, in order."""

    label: str
    points: Points


@dataclass(frozen=True)
class Chart:
    """One chart. `kind`: "number", "bytes" or "seconds"; `zero`: whether the axis begins at 0."""

    title: str
    lines: tuple[Line, ...]
    kind: str = "number"
    zero: bool = False
    note: str = ""


def draw(chart: Chart) -> str:
    """The chart as a `<figure>`; "" where no line has a point."""
    lines = [(number, line) for number, line in enumerate(chart.lines) if line.points]
    if not lines:
        return ""
    steps = [step for _, line in lines for step, _ in line.points]
    values = [value for _, line in lines for _, value in line.points]
    scale = _unit(chart.kind, max(map(abs, values)))
    ticks = _ticks(0.0 if chart.zero else min(values), max(values), scale[0])
    low, high = ticks[0], ticks[-1]
    first, last = min(steps), max(steps)
    span = (last - first) or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / span * (WIDTH - LEFT - RIGHT) if last > first else (LEFT + WIDTH - RIGHT) / 2
        return x, TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(ticks, scale, place, first, last)]
    parts += [_line(number, line, place, chart.kind) for number, line in lines]
    key = "".join(
        f'<span class="key"><i class="b{number}"></i>{escape(line.label)} <b>{escape(text(line.points[-1][1], chart.kind))}</b></span>'
        for number, line in lines
    )
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    label = escape(f"{chart.title}: {', '.join(line.label for _, line in lines)} over the steps", quote=True)
    return (
        f'<figure><figcaption>{escape(chart.title)}</figcaption><div class="keys">{key}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>{note}</figure>'
    )


def text(value: float, kind: str = "number") -> str:
    """A value for people: bytes and seconds with their unit, other numbers with four digits."""
    if not math.isfinite(value):
        return str(value)
    size, unit = _unit(kind, abs(value))
    if kind == "number":
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 and abs(value) >= 1000 else f"{value:.4g}"
    return f"{value / size:.4g} {unit}"


def _unit(kind: str, most: float) -> tuple[float, str]:
    """(size, name) of the unit that fits the largest value."""
    units: dict[str, list[tuple[float, str]]] = {
        "bytes": [(1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB")],
        "seconds": [(1e-3, "ms"), (1, "s"), (60, "min")],
    }
    fitting = [unit for unit in units.get(kind, []) if unit[0] <= most]
    return fitting[-1] if fitting else units.get(kind, [(1, "")])[0]


def _ticks(low: float, high: float, size: float) -> list[float]:
    """Three to seven round values from at most `low` to at least `high`, round in a unit of `size`."""
    low, high = low / size, high / size
    if not high - low > FINEST:
        pad = abs(low) * 0.1
        low, high = (low - pad, high + pad) if pad > FINEST else (0.0, 1.0)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    begin, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step * size for number in range(begin, max(end, begin + 1) + 1)]


def _whole(first: float, last: float) -> list[int]:
    """At most seven round steps from `first` to `last`."""
    raw = max((last - first) / 6, 1)
    power = 10 ** math.floor(math.log10(raw))
    every = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return list(range(math.ceil(first / every) * every, math.floor(last) + 1, every)) or [round(first)]


def _grid(
    ticks: list[float], scale: tuple[float, str], place: Callable[[float, float], tuple[float, float]], first: float, last: float
) -> str:
    size, unit = scale
    parts = []
    for tick in ticks:
        _, y = place(first, tick)
        label = f"{tick / size:.6g}" + (f" {unit}" if unit else "")
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{y + 4:.1f}">{label}</text>')
    for step in _whole(first, last):
        x, _ = place(step, ticks[0])
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{step:,}</text>')
    return "".join(parts)


def _line(number: int, line: Line, place: Callable[[float, float], tuple[float, float]], kind: str) -> str:
    drawn = _thin(line.points)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in drawn))
    parts = [f'<polyline class="l{number}" points="{path}"/>']
    if len(drawn) <= MOST_MARKS:
        for step, value in drawn:
            x, y = place(step, value)
            title = escape(f"step {step:g}: {line.label} {text(value, kind)}")
            parts.append(f'<circle class="d{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{title}</title></circle>')
    return "".join(parts)


def _thin(points: Points) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` points, the extremes of every stretch among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (MOST_POINTS // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept
