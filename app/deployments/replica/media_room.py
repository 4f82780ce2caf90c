"""Bounds the pixels of pictures and the features of sounds that wait or run in one replica's engine, whichever ingress
they came from."""

from __future__ import annotations

from collections.abc import Callable

from app.errors import InvalidRequestError, OverloadedError
from app.records.encoder_input import encoder_input_of
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
        """Count a request's pixels and features until it is no longer here. OverloadedError where there is no room for
        them, InvalidRequestError where there never is."""
        own = _values_of(request)
        if not own:
            return
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
            what = f"{sum(own.values())} bytes of pixels or features; an engine holds {self._most}"
            raise InvalidRequestError(f"messages: the pictures and sounds have {what}: send fewer or smaller ones")
        what = f"pictures and sounds of {found} bytes would be in this engine, which holds {self._most}"
        raise OverloadedError(f"{what}; try later")

    def _count(self) -> None:
        """Count again what is here."""
        self._sizes = {name: own for name, own in self._sizes.items() if self._is_here(name)}
        self._look_at = max(_FEW, 2 * len(self._sizes))
        self._total = sum({pixels: size for own in self._sizes.values() for pixels, size in own.items()}.values())


def _values_of(request: EngineRequest) -> dict[int, int]:
    """Sizes of what encoders will read, by what it is in memory."""
    media, read = media_of(request.asks), encoder_input_of(request.asks)
    values = [item.pixels for item in media.items] if media is not None else []
    return {id(one): len(one) for one in (*values, *(() if read is None else (read.values,)))}
