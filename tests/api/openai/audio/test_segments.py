"""Segments out of tokens: texts are lists of words here, and times tokens from 100 on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from app.api.openai.audio.segments import segments_of

TIME = 100


def decoded(tokens: Sequence[int]) -> str:
    return "".join(f" w{token}" if token < 50 else " " for token in tokens)


def at(seconds: float) -> int:
    return TIME + round(seconds / 0.02)


def found(*tokens: int, begin: float = 0.0, end: float = 30.0) -> list[tuple[float, float, str, tuple[int, ...]]]:
    segments = segments_of(tokens, TIME, begin, end, decoded)
    return [(round(one.begin_s, 3), round(one.end_s, 3), one.text, one.token_ids) for one in segments]


def test_pairs_of_times() -> None:
    tokens = [at(0), 1, 2, at(1.5), at(1.5), 3, at(4.02)]
    assert found(*tokens) == [(0.0, 1.5, " w1 w2", tuple(tokens[:4])), (1.5, 4.02, " w3", tuple(tokens[4:]))]


def test_a_piece_s_times_begin_where_it_does() -> None:
    assert found(at(1), 1, at(2), begin=30.0, end=60.0) == [(31.0, 32.0, " w1", (at(1), 1, at(2)))]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1, 2], [(0.0, 30.0, " w1 w2")]),
        ([at(0), 1], [(0.0, 30.0, " w1")]),
        ([1, at(2)], [(0.0, 2.0, " w1")]),
        ([at(0), 1, at(2), 2, at(3)], [(0.0, 2.0, " w1"), (2.0, 3.0, " w2")]),
        ([at(0), at(1), 1, at(2)], [(1.0, 2.0, " w1")]),
        ([at(1), 60, at(2), at(2), 1, at(3)], [(2.0, 3.0, " w1")]),
        ([at(0), at(1)], []),
        ([at(5), 1, at(5)], [(5.0, 5.02, " w1")]),
        ([at(5), 1, at(29.9), at(29.9), 2, at(40)], [(5.0, 29.9, " w1"), (29.9, 30.0, " w2")]),
    ],
)
def test_odd_ones(tokens: list[int], expected: list[tuple[float, float, str]]) -> None:
    assert [one[:3] for one in found(*tokens)] == expected


def test_a_model_without_times_has_one_segment() -> None:
    (one,) = segments_of([1, 2, 199], None, 5.0, 7.0, lambda tokens: f" {len(tokens)} words")
    assert (one.begin_s, one.end_s, one.text) == (5.0, 7.0, " 3 words")
