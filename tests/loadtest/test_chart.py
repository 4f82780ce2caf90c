"""Charts: the XML is well formed, and points stand where their values say."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from loadtest.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Line, line_chart


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([], [0, 1]),
        ([0.0], [0, 1]),
        ([1.0], [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([3.0, 64.0], [0, 20, 40, 60, 80]),
        ([0.013], [0, 0.005, 0.01, 0.015]),
        ([99_999.0], [0, 20_000, 40_000, 60_000, 80_000, 100_000]),
    ],
)
def test_ticks_are_round_and_hold_all_values(values: list[float], ticks: list[float]) -> None:
    axis = Axis.linear("x", values)
    assert list(axis.ticks) == pytest.approx(ticks)
    assert all(0 <= axis.place(value) <= 1 for value in values)


def test_points_stand_where_they_belong() -> None:
    svg = line_chart("A < B & C", "users", "ms", [Line("p50", [(0, 0), (50, 5), (100, 10)], ["1", "2", "3"])])
    root = ElementTree.fromstring(svg)
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter("circle")]
    assert dots == [
        (LEFT, HEIGHT - BOTTOM),
        ((LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2),
        (WIDTH - RIGHT, TOP),
    ]
    tips = [title.text for title in root.iter("title")]
    assert tips[1] == "p50, 2: 5 at 50"
    assert "A < B & C" in [text.text for text in root.iter("text")]


def test_points_without_a_value_are_left_out() -> None:
    root = ElementTree.fromstring(line_chart("t", "x", "y", [Line("a", [(1, math.nan), (2, 3)]), Line("b", [])]))
    assert len(list(root.iter("circle"))) == 1
