"""Numbers of the command line: bounds hold, and what is none is refused in words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import pytest

from app.cli.numbers import at_least, between, positive


def test_numbers_within_bounds() -> None:
    assert at_least(1)("1") == 1
    assert between(0.0, 1.0)("1") == 1.0
    assert positive("inf") == math.inf


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (at_least(1), "0"),
        (at_least(1), "1.5"),
        (between(0.0, 1.0), "1.01"),
        (between(0.0, 1.0), "nan"),
        (positive, "0"),
        (positive, "x"),
    ],
)
def test_others_are_refused(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        parse(text)
