"""Bounds the pixels of the pictures that wait or run in one replica's engine, whichever ingress they came from."""

from __future__ import annotations

from collections.abc import Callable

from app.errors import InvalidRequestError, OverloadedError
from app.records.media import media_of
from app.records.request import EngineRequest

_FEW = 4096  # requests that may be over and still counted, before somebody looks


class MediaRoom:
    """At most `most` bytes; what choices of one prompt share counts once. `is_here` tells of a request by its id."""

    def __init__(self, most: int, is_here: Callable[[str], bool]) -> None:
        self._most = most
        self._is_here = is_here
        self._sizes: dict[str, dict[int, int]] = {}  # of each request's pixels, by what they are in memory
        self._total = 0
        self._look_at = _FEW  # requests

    def take(self, request: EngineRequest) -> None:
        """Count a request's pixels until it is no longer here. OverloadedError where there is no room for them,
        InvalidRequestError where there never is."""
        media = media_of(request.asks)
        if media is None:
            return
        own = {id(item.pixels): len(item.pixels) for item in media.items}
        self._sizes[request.request_id] = own
        self._total += sum(own.values())
        if self._total > self._most or len(self._sizes) > self._look_at:
            self._count()
        if self._total <= self._most:
            return
        found = self._total
        del self._sizes[request.request_id]
        self._count()
        if sum(own.values()) > self._most:
            what = f"{sum(own.values())} bytes of pixels; an engine holds {self._most}"
            raise InvalidRequestError(f"messages: the pictures have {what}: send fewer or smaller ones")
        raise OverloadedError(f"pictures of {found} bytes would be in this engine, which holds {self._most}; try later")

    def _count(self) -> None:
        """Count again what is here."""
        self._sizes = {name: own for name, own in self._sizes.items() if self._is_here(name)}
        self._look_at = max(_FEW, 2 * len(self._sizes))
        self._total = sum({pixels: size for own in self._sizes.values() for pixels, size in own.items()}.values())
