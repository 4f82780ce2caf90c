"""Reading pictures in processes that may be killed: what comes back, what is remembered, what bad files cost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from app import limited_process
from app.config.media import MediaConfig
from app.errors import InvalidRequestError
from app.media import decoders
from app.media.picture import Picture
from app.media.processors.base import Layout
from app.media.processors.qwen_vl import QwenVLProcessor
from app.media.reader import MediaReader, in_field
from tests import limits
from tests.media.pictures import file_of, picture

SETTINGS = {**QwenVLProcessor.settings_of({}, {}), "placeholder": "<|image_pad|>"}
PROCESSOR = QwenVLProcessor(SETTINGS)


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    config = MediaConfig(decode_timeout_s=limits.patience_s(), max_decoders=1, max_image_side=20_000)
    others = psutil.Process().children()
    reader = MediaReader(config, b"k" * 32)
    assert psutil.Process().children() == others, "nothing starts before the first picture"
    yield reader
    reader.close()


def test_what_fetches_is_loaded_where_a_host_is_allowed(reader: MediaReader) -> None:
    with pytest.raises(InvalidRequestError, match="takes pictures as data URLs only"):
        asyncio.run(reader.fetch("http://images.example/a.png", lambda _: None, "image", None))
    code = "import sys, app.media.reader; sys.exit('aiohttp' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    allowed = MediaReader(MediaConfig(allowed_media_domains=("images.example",)), b"k" * 32)
    with pytest.raises(InvalidRequestError, match="its host is none of those"):
        asyncio.run(allowed.fetch("http://other.example/a.png", lambda _: None, "image", None))
    allowed.close()


def test_identity_is_of_pixels_settings_and_tenant(reader: MediaReader) -> None:
    image = picture(90, 60)
    first = reader.read(file_of(image), "qwen_vl", PROCESSOR)
    again = reader.read(file_of(image, compress_level=1), "qwen_vl", PROCESSOR)
    assert (first.layout.grid, first.shape) == ((1, 4, 6), (24, 3, 14, 14))
    assert len(first.pixels) == 24 * 588
    assert again.digest == first.digest, "another file of the same pixels"
    own = reader.read(np.asarray(image), "qwen_vl", PROCESSOR)
    assert (own.digest, own.pixels, own.layout) == (first.digest, first.pixels, first.layout)
    with pytest.raises(InvalidRequestError, match="30000 x 1 pixels"):
        reader.read(np.zeros((1, 30_000, 3), np.uint8), "qwen_vl", PROCESSOR)
    wider = QwenVLProcessor({**SETTINGS, "max_pixels": SETTINGS["max_pixels"] - 1})
    others = [
        reader.read(file_of(picture(90, 60, seed=1)), "qwen_vl", PROCESSOR),
        reader.read(file_of(image.resize((91, 60))), "qwen_vl", PROCESSOR),
        reader.read(file_of(image), "qwen_vl", wider),
        reader.read(file_of(image), "qwen_vl", PROCESSOR, "tenant"),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 5
    lying = Image.Exif()
    lying[0x0112] = 6
    turned = reader.read(file_of(image, "JPEG", exif=lying), "qwen_vl", PROCESSOR)
    assert turned.layout.grid == (1, 6, 4)


def test_a_file_that_came_before_is_not_decoded_again(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(picture(64, 64, seed=7))
    first = reader.read(data, "qwen_vl", PROCESSOR)
    monkeypatch.setattr(decoders.Decoders, "decode", None)
    assert reader.read(data, "qwen_vl", PROCESSOR) is first
    with pytest.raises(TypeError):
        reader.read(data, "qwen_vl", PROCESSOR, "another tenant")


@pytest.mark.parametrize("is_right", [True, False])
def test_a_new_file_that_several_bring_at_once_is_decoded_once(
    reader: MediaReader, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    """What is wrong with it all of them are told, and the next one has it looked at again."""
    data, begun, go, calls = file_of(picture(64, 64, seed=8 + is_right)), threading.Event(), threading.Event(), []
    plain = decoders.Decoders.decode

    def decode(*given: Any) -> decoders.Decoded:
        calls.append(given)
        begun.set()
        assert go.wait(limits.patience_s())
        if not is_right:
            raise InvalidRequestError("is no picture")
        return plain(*given)

    monkeypatch.setattr(decoders.Decoders, "decode", decode)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(reader.read, data, "qwen_vl", PROCESSOR)
        assert begun.wait(limits.patience_s())
        others = [pool.submit(reader.read, data, "qwen_vl", PROCESSOR) for _ in range(3)]
        go.set()
        if is_right:
            assert {id(one.result()) for one in others} == {id(first.result())}
            assert len(calls) == 1
        else:
            assert {type(one.exception()) for one in (first, *others)} == {InvalidRequestError}
    monkeypatch.setattr(decoders.Decoders, "decode", plain)
    assert reader.read(data, "qwen_vl", PROCESSOR).pixels


def test_who_has_room_for_a_video_is_not_told_of_anothers_lack(
    reader: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that bring it at once, each with its own bound."""
    begun, go = threading.Event(), threading.Event()
    read = Picture(b"d", Layout((1, 1), (1, 1, 1), ()), (1,), b"p")

    def decoded(_video: bytes, _family: str, _processor: Any, most_tokens: int, _asked: list[bytes]) -> Picture:
        if most_tokens >= 1000:
            return read
        begun.set()
        assert go.wait(limits.patience_s())
        raise InvalidRequestError(f"1000 tokens; at most {most_tokens} fit")

    monkeypatch.setattr(reader.videos, "read", decoded)
    processor: Any = PROCESSOR
    with ThreadPoolExecutor(1) as pool:
        small = pool.submit(reader.read_video, b"a video", "family", processor, 500)
        try:
            assert begun.wait(limits.patience_s())
            assert reader.read_video(b"a video", "family", processor, 2000) is read
        finally:
            go.set()
        with pytest.raises(InvalidRequestError, match="at most 500 fit"):
            small.result()


def test_a_picture_that_is_too_much_costs_a_process() -> None:
    large = Image.new("L", (5000, 5000))
    config = MediaConfig(decode_memory_bytes=64 << 20, decode_timeout_s=limits.patience_s(), max_image_pixels=1 << 26)
    small = MediaReader(config, b"k")
    try:
        others = set(psutil.Process().children())
        small.read(file_of(picture()), "qwen_vl", PROCESSOR)
        (before,) = set(psutil.Process().children()) - others
        with (
            pytest.raises(InvalidRequestError, match=r"messages.0 is too much work: .* 64 MiB"),
            in_field("messages.0"),
        ):
            small.read(file_of(large), "qwen_vl", PROCESSOR)
        assert not before.is_running()
        assert small.read(file_of(picture(seed=3)), "qwen_vl", PROCESSOR)
    finally:
        small.close()


def test_processes_are_few() -> None:
    """However many ask at once."""
    others = set(psutil.Process().children())
    own = MediaReader(MediaConfig(decode_timeout_s=limits.patience_s(), max_decoders=2, cache_bytes=0), b"k")
    try:
        with ThreadPoolExecutor(6) as pool:
            files = [file_of(picture(seed=seed)) for seed in range(12)]
            found = list(pool.map(lambda file: own.read(file, "qwen_vl", PROCESSOR), files))
        assert len({one.digest for one in found}) == 12
        assert 1 <= len(set(psutil.Process().children()) - others) <= 2
    finally:
        own.close()


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts the process's own time, of which this picture takes a hundred times as much."""
    monkeypatch.setattr(limited_process, "PATIENCE", 1e9)
    hasty = MediaReader(MediaConfig(decode_timeout_s=limits.scaled_s(1e-3)), b"k")
    try:
        with pytest.raises(InvalidRequestError, match="too much work: decoding it takes more than "):
            hasty.read(file_of(Image.new("RGB", (2500, 2500))), "qwen_vl", PROCESSOR)
    finally:
        hasty.close()


def test_a_malformed_file_costs_nothing(reader: MediaReader) -> None:
    data = file_of(picture(64, 64), "JPEG")
    before = [child.pid for child in psutil.Process().children()]
    with pytest.raises(InvalidRequestError, match=r"is a malformed JPEG: .*truncated"):
        reader.read(data[:-200], "qwen_vl", PROCESSOR)
    assert [child.pid for child in psutil.Process().children()] == before
    assert reader.read(data, "qwen_vl", PROCESSOR)
