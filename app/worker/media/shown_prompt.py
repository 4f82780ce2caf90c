"""Says of one request's prompt where its pictures stand, and the positions of its tokens by frame, row and column.

Positions are those of M-RoPE (Wang et al., "Qwen2-VL", 2024): text counts on in all three coordinates, a picture counts
each of its own from where it begins, and what follows goes on behind the largest of its rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.layers.rope_scaling import NUM_AXES
from app.records.media import MediaAsk, MediaItem
from app.records.media_info import MediaInfo

Int64Array = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class ShownItem:
    """An item and the tokens that stand for pieces of it."""

    item: MediaItem
    places: Int64Array  # in the prompt, ascending

    def between(self, first: int, end: int) -> slice:
        """Finds which of its embeddings the tokens from `first` to before `end` take."""
        low, high = np.searchsorted(self.places, (first, end))
        return slice(int(low), int(high))


def shown_items(token_ids: NDArray[np.int32], ask: MediaAsk, media: MediaInfo) -> list[ShownItem]:
    """The items of a prompt with their places."""
    return [ShownItem(item, _places(token_ids, item, media)) for item in ask.items]


@dataclass(slots=True, frozen=True)
class PositionRule:
    """Says how a model's pictures and videos take positions."""

    merge: int = 1  # patches along each side of a token
    seconds_rate: float = 0.0  # positions that a second of a video takes; 0: a frame takes one
    by_time: bool = False  # to the fraction of a second, and what follows goes on behind the largest of all three


def rope_positions(items: list[ShownItem], num_tokens: int, rule: PositionRule) -> tuple[Int64Array, int]:
    """Positions [num_tokens, 3] of a prompt, and what those of tokens behind it differ by from their indices. Sounds
    count on as text does."""
    positions = np.empty((num_tokens, NUM_AXES), np.int64)
    index = at = 0  # of the next token, and its position
    for shown in (one for one in items if one.item.kind != "audio"):
        for start, grid in _runs(shown, rule.merge):
            positions[index:start] = np.arange(at, at + start - index)[:, None]
            at += start - index
            index = start + int(np.prod(grid))
            own = np.indices(grid).reshape(NUM_AXES, -1).T
            own[:, 0] = _times(own[:, 0], shown.item, rule)
            positions[start:index] = own + at
            at += int(own.max()) + 1 if rule.by_time else max(grid[1:])
    positions[index:] = np.arange(at, at + num_tokens - index)[:, None]
    return positions, int(positions.max(initial=-1)) + 1 - num_tokens


def _times(frames: Int64Array, item: MediaItem, rule: PositionRule) -> Int64Array:
    """Positions in time of an item's frames."""
    if item.kind != "video" or not rule.seconds_rate:
        return frames
    if rule.by_time:  # in fp32, as transformers computes them
        seconds = frames.astype(np.float32) * np.float32(item.seconds_per_frame)
        return (seconds * np.float32(rule.seconds_rate)).astype(np.int64)
    return frames * int(int(item.seconds_per_frame) * rule.seconds_rate)


def _places(token_ids: NDArray[np.int32], item: MediaItem, media: MediaInfo) -> Int64Array:
    own = token_ids[item.offset : item.end] == media.piece(item.kind)
    return np.flatnonzero(own) + item.offset


def _runs(shown: ShownItem, merge: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Finds where the tokens of each part of an item begin that text does not interrupt, and the part's grid of tokens:
    all of it, or a frame where text stands between frames."""
    frames, height, width = shown.item.grid[0], shown.item.grid[1] // merge, shown.item.grid[2] // merge
    places = shown.places
    begins = [0, *(np.flatnonzero(np.diff(places) > 1) + 1).tolist()]
    each = frames if len(begins) == 1 else 1
    for begin in begins:
        yield int(places[begin]), (each, height, width)
