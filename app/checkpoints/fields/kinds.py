"""Kinds of values that fields of a checkpoint's files may have: types and ranges, as tables name them. No torch (I8).

`true` is no number, 9.5 no size, "no" no flag: what Python would take for something else is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import CheckpointError, MantaError

MOST_IDS = 1 << 10  # every request carries those that end it


@dataclass(slots=True, frozen=True)
class Kind:
    """A kind of value: what an error calls it, and whether a value is of it."""

    expected: str
    holds: Callable[[Any], bool]


def check(values: Mapping[str, Any], fields: Mapping[str, Kind], file: str, path: str = "") -> None:
    """CheckpointError names the first field of `values` that is not of its kind; null is what is left out. `path`: what
    stands before the names of fields that lie deeper in the file."""
    for name, kind in fields.items():
        value = values.get(name)
        if value is not None:
            expect(value, kind, f"{file} is not usable: {path}{name}")


def expect(value: Any, kind: Kind, what: str, error: type[MantaError] = CheckpointError) -> None:
    """Raise `error` where `value`, which `what` names, is not of this kind."""
    if not kind.holds(value):
        raise error(f"{what} is {value!r:.80}, not {kind.expected}", param="model")


def is_number(value: Any) -> bool:
    """True if it is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1e300 < value < 1e300


def whole(least: int, most: int) -> Kind:
    """Whole numbers of a range, also as 64.0."""

    def holds(value: Any) -> bool:
        return is_number(value) and least <= value <= most and value == int(value)

    return Kind(f"a whole number from {least} to {most:,}", holds)


def number(least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf) -> Kind:
    """Finite numbers of a range, whose lower end belongs to it (`least`) or not (`above`)."""
    lower = [f"above {above:g}"] if above > -math.inf else [f"from {least:g}"] if least > -math.inf else []
    upper = [f"up to {most:g}"] if most < math.inf else []

    def holds(value: Any) -> bool:
        return is_number(value) and least <= value <= most and value > above

    return Kind(" ".join(["a number", *lower, *upper]), holds)


def several(kind: Kind, most: int, least: int = 0) -> Kind:
    """Lists of values of one kind."""

    def holds(value: Any) -> bool:
        return isinstance(value, list | tuple) and least <= len(value) <= most and all(map(kind.holds, value))

    return Kind(f"a list of at most {most:,}, each {kind.expected}", holds)


def either(*kinds: Kind) -> Kind:
    """Values of any of these kinds."""
    return Kind(", nor ".join(kind.expected for kind in kinds), lambda value: any(kind.holds(value) for kind in kinds))


def token_ids(vocab_size: int) -> Kind:
    """A token id or several, all of the vocabulary."""

    def is_id(value: Any) -> bool:
        return type(value) is int and 0 <= value < vocab_size

    def holds(value: Any) -> bool:
        return is_id(value) or (isinstance(value, list) and len(value) <= MOST_IDS and all(map(is_id, value)))

    return Kind(f"a token id below vocab_size={vocab_size}, or a list of at most {MOST_IDS:,}", holds)


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
