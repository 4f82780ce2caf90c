"""Pixels in one engine: counted while their requests are here, once for all choices of a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.deployments.replica.media_room import MediaRoom
from app.errors import InvalidRequestError, OverloadedError
from app.records.encoder_input import EncoderInput
from app.records.media import MediaAsk, MediaItem
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams


def request(name: str, num_bytes: int) -> EngineRequest:
    item = MediaItem("image", b"d" * 16, 0, 1, (1, 1, 1), (num_bytes,), bytes(num_bytes))
    return EngineRequest(name, [1], SamplingParams(), asks=(MediaAsk((item,)),))


def test_pixels_count_until_their_request_is_gone() -> None:
    here = {"a", "b", "c", "d", "e"}
    room = MediaRoom(100, here.__contains__)
    room.take(EngineRequest("text", [1], SamplingParams()))
    sizes = {"a": 60, "b": 50, "c": 40, "d": 60, "e": 1}
    requests = {name: request(name, size) for name, size in sizes.items()}  # kept, as an engine does
    room.take(requests["a"])
    with pytest.raises(
        OverloadedError, match="pictures and sounds of 110 bytes would be in this engine, which holds 100"
    ):
        room.take(requests["b"])
    room.take(requests["c"])
    here.remove("a")
    room.take(requests["d"])
    with pytest.raises(OverloadedError):
        room.take(requests["e"])


def test_what_an_encoder_reads_counts() -> None:
    room = MediaRoom(100, lambda _: True)
    heard = EncoderInput("audio", b"d" * 16, 3, (2, 8), bytes(64))
    room.take(EngineRequest("a", [1], SamplingParams(), asks=(heard,)))
    room.take(EngineRequest("b", [1], SamplingParams(), asks=(heard,)))  # the same bytes
    with pytest.raises(OverloadedError, match="of 128 bytes"):
        room.take(EngineRequest("c", [1], SamplingParams(), asks=(replace(heard, values=bytes(bytearray(64))),)))


def test_choices_share_their_pixels() -> None:
    names = [f"r-{i}" for i in range(9)]
    room, first = MediaRoom(100, names.__contains__), request("r-0", 60)
    for name in names:
        room.take(replace(first, request_id=name))


def test_what_never_fits_is_no_matter_of_time() -> None:
    room = MediaRoom(100, lambda _: True)
    with pytest.raises(
        InvalidRequestError, match="the pictures and sounds have 101 bytes of pixels or features; an engine holds 100"
    ):
        room.take(request("a", 101))
    room.take(request("b", 100))


def test_requests_that_are_over_are_forgotten_by_themselves() -> None:
    room = MediaRoom(1 << 40, lambda _: False)
    for i in range(10_000):
        room.take(request(str(i), 1))
    assert len(room._sizes) <= 4097
