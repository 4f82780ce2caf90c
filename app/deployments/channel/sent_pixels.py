"""Keeps account of the pixels that a replica has: a request names those by their digest, and brings the others."""

from __future__ import annotations

from app.records.media import media_of, with_pixels
from app.records.request import EngineRequest
from app.records.sized_cache import SizedCache


class SentPixels:
    """An ingress's account of one replica. It may be wrong, as others send there too: then the replica says so
    (PixelsGoneError), and is sent everything."""

    def __init__(self, max_bytes: int) -> None:
        self._known: SizedCache[bool] = SizedCache(max_bytes)

    def without_known(self, request: EngineRequest) -> EngineRequest:
        """The request without the pixels that the replica has."""
        return with_pixels(request, lambda item: b"" if self._known.find(item.digest) else item.pixels)

    def note(self, request: EngineRequest) -> None:
        """The replica has taken a request: it has the pixels of all of its items, whether they came with it or not."""
        ask = media_of(request.asks)
        for item in () if ask is None else ask.items:
            self._known.keep(item.digest, True, len(item.pixels))

    def forget(self) -> None:
        """The account was wrong."""
        self._known.clear()
