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


def rope_positions(
    items: list[ShownItem], num_tokens: int, merge: int, seconds_rate: float = 0.0
) -> tuple[Int64Array, int]:
    """Positions [num_tokens, 3] of a prompt, and what those of tokens behind it differ by from their indices.

    `merge`: patches along each side of a token. `seconds_rate`: positions that a second of a video takes.
    """
    positions = np.empty((num_tokens, NUM_AXES), np.int64)
    index = at = 0  # of the next token, and its position
    for shown in items:
        for start, grid in _runs(shown, merge):
            positions[index:start] = np.arange(at, at + start - index)[:, None]
            at += start - index
            step = int(int(shown.item.seconds_per_frame) * seconds_rate) if _goes_by_time(shown, seconds_rate) else 1
            index = start + int(np.prod(grid))
            coordinates = np.indices(grid).reshape(NUM_AXES, -1).T
            positions[start:index] = coordinates * (step, 1, 1) + at
            at += max(grid[1:])
    positions[index:] = np.arange(at, at + num_tokens - index)[:, None]
    return positions, int(positions.max(initial=-1)) + 1 - num_tokens


def _goes_by_time(shown: ShownItem, seconds_rate: float) -> bool:
    return shown.item.kind == "video" and seconds_rate > 0


def _places(token_ids: NDArray[np.int32], item: MediaItem, media: MediaInfo) -> Int64Array:
    own = token_ids[item.offset : item.end] == media.placeholder(item.kind)
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
