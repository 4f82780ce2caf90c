"""The shape of JSON is bounded before anything parses it, by counts that Python's own parser agrees with."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from app.api.http.body import MAX_CONTAINERS, check_shape
from app.errors import InvalidRequestError

WORDS = ("[[[[[[", "}{", '"', "\\", "é", "a:b,c", "")


def depth_of(value: Any) -> int:
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth_of, inside), default=0)
    return 0


def some_json(draw: random.Random, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice([*WORDS, 1, None, 2.5])
    parts = [some_json(draw, depth - 1) for _ in range(draw.randrange(4))]
    if draw.random() < 0.5:
        return parts
    return {f"{draw.choice(WORDS)}{number}": part for number, part in enumerate(parts)}


def test_depth_is_that_of_the_parsed_value() -> None:
    """Brackets and quotes inside of strings do not count."""
    draw, refused = random.Random(7), 0
    for _ in range(400):
        value = some_json(draw, 6)
        raw = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        if depth_of(value) > 3:
            refused += 1
            with pytest.raises(InvalidRequestError, match="nests arrays and objects more than 3 deep"):
                check_shape(raw, 3)
        else:
            check_shape(raw, 3)
    assert 50 < refused < 350


def test_containers_are_counted() -> None:
    few, many = (b"[" + b",".join([b"[]"] * number) + b"]" for number in (MAX_CONTAINERS - 1, MAX_CONTAINERS))
    check_shape(few, 8)
    with pytest.raises(InvalidRequestError, match="the line has more than 131072 arrays and objects"):
        check_shape(many, 8, "line")
