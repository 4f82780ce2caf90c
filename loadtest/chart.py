"""A line chart as inline SVG: no script, no font, no file beside the page; colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 46


@dataclass(slots=True, frozen=True)
class Line:
    """One series. `labels`, where given, stand beside the points."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


@dataclass(slots=True, frozen=True)
class Axis:
    """One axis: title, and the values that its ticks stand at."""

    title: str
    ticks: Sequence[float]

    @classmethod
    def linear(cls, title: str, values: Sequence[float], count: int = 5) -> Axis:
        """From 0 to a round number above all values, in round steps."""
        step = _round_step(max([*values, 0.0]), count)
        top = max(1, math.ceil(max([*values, 0.0]) / step - 1e-9))
        return cls(title, [i * step for i in range(top + 1)])

    def place(self, value: float) -> float:
        """Where a value stands: 0 at the first tick, 1 at the last."""
        low, high = self.ticks[0], self.ticks[-1]
        return (value - low) / (high - low)


def line_chart(title: str, x_title: str, y_title: str, lines: Sequence[Line]) -> str:
    """The chart as an <svg> element. Points that are not finite are left out; hovering a point shows its values."""
    lines = [Line(line.name, [p for p in line.points if all(map(math.isfinite, p))], line.labels) for line in lines]
    x = Axis.linear(x_title, [point[0] for line in lines for point in line.points])
    y = Axis.linear(y_title, [point[1] for line in lines for point in line.points])
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
        *_grid(x, y),
        *(part for i, line in enumerate(lines) for part in _line(i, line, x, y)),
        *_legend(lines),
        "</svg>",
    ]
    return "\n".join(parts)


def _round_step(largest: float, count: int) -> float:
    """1, 2 or 5 times a power of ten, so that about `count` steps reach `largest`."""
    if largest <= 0:
        return 1.0
    raw = largest / count
    power = 10.0 ** math.floor(math.log10(raw))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _number(tick: float) -> str:
    return f"{tick:,.0f}" if tick >= 1000 else f"{tick:g}"


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _grid(x: Axis, y: Axis) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y.ticks:
        at = _y(y, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + 4:.1f}">{_number(tick)}</text>')
    for tick in x.ticks:
        parts.append(f'<text class="tick mid" x="{_x(x, tick):.1f}" y="{bottom + 16}">{_number(tick)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text class="tick mid" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}">{escape(x.title)}</text>')
    parts.append(
        f'<text class="tick mid" x="14" y="{middle}" transform="rotate(-90 14 {middle})">{escape(y.title)}</text>'
    )
    return parts


def _line(index: int, line: Line, x: Axis, y: Axis) -> list[str]:
    places = [(_x(x, px), _y(y, py)) for px, py in line.points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    parts = [f'<polyline class="line s{index}" points="{path}"/>']
    for i, ((px, py), (vx, vy)) in enumerate(zip(places, line.points, strict=True)):
        label = line.labels[i] if i < len(line.labels) else ""
        tip = escape(f"{line.name}{', ' + label if label else ''}: {vy:,.4g} at {vx:,.4g}")
        parts.append(f'<circle class="dot s{index}" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{tip}</title></circle>')
        if label:
            parts.append(f'<text class="tick mid" x="{px:.1f}" y="{py - 7:.1f}">{escape(label)}</text>')
    return parts


def _legend(lines: Sequence[Line]) -> list[str]:
    parts, right = [], float(WIDTH - RIGHT)
    for i, line in reversed(list(enumerate(lines))):
        right -= 6.4 * len(line.name) + 8
        parts.append(f'<text class="tick" x="{right:.1f}" y="16">{escape(line.name)}</text>')
        right -= 18
        parts.append(f'<line class="line s{i}" x1="{right:.1f}" y1="12" x2="{right + 14:.1f}" y2="12"/>')
    return parts
