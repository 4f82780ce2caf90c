"""Pieces of a sound: all of it, none too long, cut where it is quiet."""

from __future__ import annotations

import numpy as np
import pytest

from app.media.audio.sound import Cutter, Piece, Sound

RATE = 1_000


def speech(*stretches: float) -> Sound:
    """Loud and quiet stretches in turn, of so many seconds."""
    rng = np.random.default_rng(0)
    parts = [
        rng.integers(-9_000, 9_000, round(seconds * RATE)) if i % 2 == 0 else rng.integers(-9, 9, round(seconds * RATE))
        for i, seconds in enumerate(stretches)
    ]
    return Sound(np.concatenate(parts).astype(np.int16), RATE)


def pieces_of(sound: Sound) -> list[Piece]:
    """All of it in pieces, its samples given at once."""
    cutter = Cutter(sound.rate, 30.0)
    return [*cutter.add(sound.samples), *cutter.end()]


@pytest.mark.parametrize("seconds", [0.1, 29.9, 30.0, 30.1, 61.0, 301.7])
def test_pieces_are_all_of_the_sound(seconds: float) -> None:
    sound = speech(seconds)
    pieces = pieces_of(sound)
    np.testing.assert_array_equal(np.concatenate([piece.samples for piece in pieces]), sound.samples)
    assert all(0 < len(piece.samples) <= 30 * RATE for piece in pieces)
    begins = [piece.begin_s for piece in pieces]
    assert begins == [0.0, *(piece.end_s for piece in pieces[:-1])]
    assert pieces[-1].end_s == pytest.approx(seconds)


@pytest.mark.parametrize("most", [1, 700, 29_000, 45_000])
def test_pieces_are_the_same_however_the_samples_come(most: int) -> None:
    sound = speech(26.0, 0.8, 27.0, 0.5, 20.0) if most > 1 else Sound(speech(9.0).samples, 100)
    rng = np.random.default_rng(most)
    cutter, begin, found = Cutter(sound.rate, 30.0), 0, list[Piece]()
    while begin < len(sound.samples):
        end = begin + int(rng.integers(0, most + 1))
        found += cutter.add(sound.samples[begin:end])
        begin = end
    found += cutter.end()
    expected = pieces_of(sound)
    assert [(one.begin_s, one.end_s) for one in found] == [(one.begin_s, one.end_s) for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.samples, other.samples)


def test_pieces_keep_no_more_than_their_samples() -> None:
    cutter, found = Cutter(RATE, 30.0), list[Piece]()
    for _ in range(9):
        found += cutter.add(np.ones(20 * RATE, np.int16))
    found += cutter.end()
    assert all(piece.samples.base is None for piece in found)
    assert sum(piece.samples.nbytes for piece in found) == 9 * 20 * RATE * 2


def test_a_piece_is_known_as_soon_as_more_than_its_length_has_come() -> None:
    cutter = Cutter(RATE, 30.0)
    assert list(cutter.add(np.ones(30 * RATE, np.int16))) == []
    assert len(list(cutter.add(np.ones(1, np.int16)))) == 1


def test_cuts_are_where_it_is_quiet() -> None:
    sound = speech(26.0, 0.8, 27.0, 0.5, 20.0)
    ends = [piece.end_s for piece in pieces_of(sound)][:-1]
    assert ends == pytest.approx([26.4, 54.05], abs=0.25)


def test_of_several_quiet_stretches_the_quietest_is_taken() -> None:
    sound = speech(25.0, 0.5, 1.5, 0.5, 20.0)
    sound.samples[round(27.0 * RATE) : round(27.5 * RATE)] *= 5
    (first, _) = pieces_of(sound)
    assert first.end_s == pytest.approx(25.25, abs=0.15)


def test_silence_is_cut_late() -> None:
    sound = Sound(np.zeros(70 * RATE, np.int16), RATE)
    assert [piece.end_s for piece in pieces_of(sound)] == pytest.approx([29.85, 59.7, 70.0], abs=0.1)


def test_loud_samples_do_not_overflow() -> None:
    loud = np.full(40 * RATE, -32_768, np.int16)
    loud[28 * RATE : 28 * RATE + 500] = 0
    (first, _) = pieces_of(Sound(loud, RATE))
    assert first.end_s == pytest.approx(28.25, abs=0.2)


def test_nothing_has_no_pieces() -> None:
    assert pieces_of(Sound(np.zeros(0, np.int16), RATE)) == []
