"""Keeps pixels and features that came with requests, for those that name them by digest."""

from __future__ import annotations

from app.deployments.channel.wire import PixelsGoneError
from app.records.media import MediaItem, media_of, with_pixels
from app.records.request import EngineRequest
from app.records.sized_cache import SizedCache


class KeptPixels:
    """At most `max_bytes`, those used longest ago leave first; a request holds its own as long as it lasts."""

    def __init__(self, max_bytes: int) -> None:
        self._pixels: SizedCache[bytes] = SizedCache(max_bytes)

    def whole(self, request: EngineRequest) -> EngineRequest:
        """The request with all of its pixels. PixelsGoneError where some neither came with it nor are here."""
        return with_pixels(request, self._of)

    def keep(self, request: EngineRequest) -> None:
        """Keep the pixels of a request that is whole."""
        ask = media_of(request.asks)
        for item in () if ask is None else ask.items:
            self._pixels.keep(item.digest, item.pixels, len(item.pixels))

    def _of(self, item: MediaItem) -> bytes:
        found = self._pixels.find(item.digest) or item.pixels  # one copy for all requests that show it
        if not found:
            raise PixelsGoneError("the pixels of a picture are not here any more")
        return found
