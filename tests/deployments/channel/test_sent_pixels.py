"""What an ingress leaves out of a request: pixels that the replica has taken in before, by its account."""

from __future__ import annotations

from dataclasses import replace

from app.deployments.channel.sent_pixels import SentPixels
from app.records.media import MediaAsk, MediaItem, media_of
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams

ONE = MediaItem("image", b"1" * 16, 0, 1, (1, 1, 1), (6,), b"first!")
TWO = replace(ONE, digest=b"2" * 16, offset=1, pixels=b"second", kind="audio")
TEXT = EngineRequest("text", [1], SamplingParams())


def shows(*items: MediaItem) -> EngineRequest:
    return replace(TEXT, asks=(MediaAsk(items),))


def left(request: EngineRequest) -> list[bytes]:
    ask = media_of(request.asks)
    return [] if ask is None else [item.pixels for item in ask.items]


def test_what_the_replica_has_taken_is_left_out() -> None:
    sent = SentPixels(12)
    assert sent.without_known(shows(ONE)) == shows(ONE)
    sent.note(shows(ONE))
    assert left(sent.without_known(shows(ONE, TWO))) == [b"", b"second"]
    sent.note(shows(ONE, TWO))
    assert left(sent.without_known(shows(TWO, ONE))) == [b"", b""]
    sent.note(TEXT)
    assert sent.without_known(TEXT) is TEXT
    sent.forget()
    assert left(sent.without_known(shows(ONE, TWO))) == [b"first!", b"second"]


def test_the_account_is_as_long_as_the_replicas_memory() -> None:
    sent = SentPixels(11)
    sent.note(shows(ONE, TWO))
    assert left(sent.without_known(shows(ONE, TWO))) == [b"first!", b""]
    nothing = SentPixels(0)
    nothing.note(shows(ONE))
    assert nothing.without_known(shows(ONE)) == shows(ONE)
