"""Pixels that a replica keeps for requests that name them by digest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.deployments.channel.wire import PixelsGoneError
from app.deployments.replica.kept_pixels import KeptPixels
from app.records.media import MediaAsk, MediaItem, media_of
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams

ONE = MediaItem("image", b"1" * 16, 0, 1, (1, 1, 1), (6,), b"first!")
TWO = replace(ONE, digest=b"2" * 16, offset=1, pixels=b"second")


def shows(*items: MediaItem) -> EngineRequest:
    return EngineRequest("a", [1, 2], SamplingParams(), asks=(MediaAsk(items),), arrival_time=0.0)


def light(item: MediaItem) -> MediaItem:
    return replace(item, pixels=b"")


def test_a_request_gets_what_came_with_others() -> None:
    kept, request = KeptPixels(12), shows(ONE, TWO)
    assert kept.whole(request) is request
    kept.keep(request)
    assert kept.whole(shows(light(TWO), light(ONE))) == shows(TWO, ONE)
    again = kept.whole(shows(replace(ONE, pixels=bytes(bytearray(b"first!")))))
    own = media_of(again.asks)
    assert own is not None
    assert own.items[0].pixels is ONE.pixels  # held once
    text = replace(request, asks=())
    assert kept.whole(text) is text
    kept.keep(text)


def test_what_is_gone_is_asked_for() -> None:
    kept = KeptPixels(11)
    kept.keep(shows(ONE))
    kept.keep(shows(TWO))
    with pytest.raises(PixelsGoneError):
        kept.whole(shows(light(ONE)))
    assert kept.whole(shows(ONE, light(TWO))) == shows(ONE, TWO)
    with pytest.raises(PixelsGoneError):
        KeptPixels(0).whole(shows(light(ONE)))
