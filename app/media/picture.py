"""One picture that was read: its place among tokens, its pixels, its identity; and those that were read lately."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from app.media.processors.base import Layout
from app.records.media import DIGEST_BYTES, MediaItem


@dataclass(slots=True, frozen=True)
class Picture:
    """A picture that a prompt may show, wherever it stands there."""

    digest: bytes
    layout: Layout
    shape: tuple[int, ...]
    pixels: bytes

    def item(self, offset: int, length: int) -> MediaItem:
        """The same at its place in a prompt."""
        return MediaItem("image", self.digest, offset, length, self.layout.grid, self.shape, self.pixels)


def digest_of(key: bytes, parts: Sequence[bytes]) -> bytes:
    """A keyed hash of `parts`, each after its length, so that no two rows of parts are one."""
    found = blake2b(digest_size=DIGEST_BYTES, key=key)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


class PictureCache:
    """Pictures by a digest of their files: bounded in bytes, those not used for longest go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Picture | None:
        """The picture of a file; None: it is not here."""
        with self._lock:
            picture = self._pictures.get(key)
            if picture is not None:
                self._pictures.move_to_end(key)
            return picture

    def add(self, key: bytes, picture: Picture) -> None:
        """Keep a picture, if one of its size may be kept."""
        with self._lock:
            if key in self._pictures or len(picture.pixels) > self._max_bytes:
                return
            self._pictures[key] = picture
            self._num_bytes += len(picture.pixels)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._pictures.popitem(last=False)
                self._num_bytes -= len(oldest.pixels)
