"""Types of command-line numbers that have bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type of integers that are at least, and at most, so large."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{value} is more than {most}")
        return value

    return parse


def between(low: float, high: float) -> Callable[[str], float]:
    """A type of numbers within bounds, both included."""

    def parse(text: str) -> float:
        value = _number(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value

    return parse


def positive(text: str) -> float:
    """A number above 0; inf is allowed."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value
