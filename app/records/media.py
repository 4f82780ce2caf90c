"""Pictures, videos and sounds as a request brings them for the worker's feature that encodes them, and what they add to
the hashes of its blocks (I5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from app.errors import InvalidRequestError
from app.records.encoder_input import encoder_input_of
from app.records.request import EngineRequest

MediaKind = Literal["image", "video", "audio"]
DIGEST_BYTES = 16
# Types of what encoders read: pixels, and features of a sound.
VALUE_TYPES: dict[MediaKind, np.dtype[np.generic]] = {
    "image": np.dtype("u1"),
    "video": np.dtype("u1"),
    "audio": np.dtype("<f4"),
}


@dataclass(slots=True, frozen=True)
class MediaItem:
    """One picture, video or sound: its place in the prompt, and its pixels, or the features of a sound, as the family's
    processor leaves them.

    `digest` is its identity: keyed, over kind, size, decoded pixels or samples and every setting of the processor.
    Pixels are not normalised: mean, deviation and scale are the encoder's.
    """

    kind: MediaKind
    digest: bytes
    offset: int  # of its first token among the prompt's
    length: int  # tokens that it takes there, break tokens within included
    # Frames, rows and columns of patches as the encoder reads them; of a sound windows, 1 and frames that are sound.
    grid: tuple[int, int, int]
    shape: tuple[int, ...]  # of `pixels`
    # Numbers of VALUE_TYPES in the encoder's own order; empty where nobody reads them, or who gets them has them.
    pixels: bytes
    seconds_per_frame: float = 0.0  # of a video whose positions go by time

    @property
    def end(self) -> int:
        """Index of the first token behind it."""
        return self.offset + self.length


@dataclass(slots=True, frozen=True)
class MediaAsk:
    """Holds what a prompt shows: items in the order of their offsets, which do not overlap."""

    items: tuple[MediaItem, ...]

    def check(self, num_prompt_tokens: int) -> None:
        """InvalidRequestError unless items lie in a prompt of so many tokens, one behind the other, whole."""
        begin = 0
        for item in self.items:
            if item.offset < begin or item.length < 1 or item.end > num_prompt_tokens:
                where = f"tokens {item.offset} to {item.end} of {num_prompt_tokens}"
                raise InvalidRequestError(
                    f"messages: an item has {where}, {begin} of which are taken", param="messages"
                )
            size = math.prod(item.shape) * VALUE_TYPES[item.kind].itemsize
            if len(item.pixels) != size or len(item.digest) != DIGEST_BYTES:
                raise InvalidRequestError("messages: an item's pixels or digest are cut off", param="messages")
            begin = item.end


def media_of(asks: Sequence[object]) -> MediaAsk | None:
    """The record of media among what a request brings; None: its prompt shows nothing."""
    return next((ask for ask in asks if isinstance(ask, MediaAsk)), None)


def with_pixels(request: EngineRequest, pixels_of: Callable[[MediaItem], bytes]) -> EngineRequest:
    """The request with what this gives of each item as the item's pixels; itself where that changes none."""
    ask = media_of(request.asks)
    if ask is None:
        return request
    found = [pixels_of(item) for item in ask.items]
    if all(item.pixels is pixels for item, pixels in zip(ask.items, found, strict=True)):
        return request
    items = tuple(replace(item, pixels=pixels) for item, pixels in zip(ask.items, found, strict=True))
    return replace(request, asks=tuple(MediaAsk(items) if one is ask else one for one in request.asks))


def block_extras(asks: Sequence[object], block_size: int, first_block: int = 0) -> dict[int, bytes] | None:
    """The `extras` of `hash_blocks` for a request's blocks from `first_block` on, which has the index 0 there.

    A block that holds tokens of an item is bound to its digest and to where in the block it begins, the first block,
    and by it all others, to the digest of what an encoder reads.
    """
    ask, encoded = media_of(asks), encoder_input_of(asks)
    if ask is None and encoded is None:
        return None
    extras: dict[int, bytes] = {}
    if encoded is not None and first_block == 0:
        extras[0] = encoded.digest
    for item in () if ask is None else ask.items:
        for block in range(max(first_block, item.offset // block_size), -(-item.end // block_size)):
            begin = (item.offset - block * block_size).to_bytes(8, "little", signed=True)
            extras[block - first_block] = extras.get(block - first_block, b"") + item.digest + begin
    return extras
