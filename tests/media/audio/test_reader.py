"""Sounds through the processes that decode them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import psutil
import pytest

from app.config.media import MediaConfig
from app.errors import InvalidRequestError, OverloadedError, UnsupportedError
from app.limited_process import ORPHAN_S, PATIENCE
from app.media.audio.mel import MelFeatures, MelSettings
from app.media.audio.reader import SoundReader
from app.media.audio.sound import Piece
from app.media.audio.sound_process import ANSWER_BYTES, SoundJobs
from tests import limits
from tests.media.audio.sounds import RATE, file_of, noise, wav

SETTINGS = MelSettings()


@pytest.fixture(scope="module")
def reader() -> Iterator[SoundReader]:
    found = SoundReader(MediaConfig(decode_timeout_s=limits.patience_s(), max_decoders=1, max_sound_s=60.0), b"key")
    yield found
    found.close()


def test_a_file_becomes_samples_and_these_features(reader: SoundReader) -> None:
    wave = noise(2.0)
    sound = reader.decode(file_of(wave), RATE)
    assert (sound.rate, sound.seconds) == (RATE, 2.0)
    assert np.abs(sound.samples / 32_768 - wave[:, 0]).max() < 1e-4
    piece = Piece(sound.samples, 0.0, sound.seconds)
    found = np.frombuffer(reader.features(piece, SETTINGS), "<f4").reshape(80, 3_000)
    expected = MelFeatures(SETTINGS).of(sound.samples.astype(np.float32) / 32_768)
    np.testing.assert_array_equal(found, expected)


def test_identity_is_of_samples_settings_and_tenant(reader: SoundReader) -> None:
    piece = Piece(np.arange(99, dtype=np.int16), 0.0, 1.0)
    other = Piece(np.arange(1, 100, dtype=np.int16), 0.0, 1.0)
    first = reader.digest(piece, SETTINGS, "a")
    assert first == reader.digest(replace(piece, begin_s=5.0), SETTINGS, "a")
    digests = {
        first,
        reader.digest(other, SETTINGS, "a"),
        reader.digest(piece, replace(SETTINGS, num_mels=128), "a"),
        reader.digest(piece, SETTINGS, "b"),
        SoundReader(MediaConfig(), b"other").digest(piece, SETTINGS, "a"),
    }
    assert len(digests) == 5
    assert {len(one) for one in digests} == {16}


def test_a_process_lives_as_long_as_its_job_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour takes more than the 30 s after which a process without a parent ends."""
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    for most_s in (1.0, 200.0):
        job = {"do": "decode", "kind": "wav", "rate": RATE, "max_s": 60.0, "most_s": most_s, "kept": None, "behind": 0}
        SoundJobs().answer(json.dumps(job).encode() + b"\n" + file_of(noise(0.1)))
    assert alarms == [ORPHAN_S, 200 * PATIENCE]


def test_errors_say_what_is_wrong(reader: SoundReader) -> None:
    with pytest.raises(UnsupportedError, match="is no sound"):
        reader.decode(b"what", RATE)
    with pytest.raises(InvalidRequestError, match="9 channels"):
        reader.decode(wav(b"\0" * 720, channels=9), RATE)
    with pytest.raises(InvalidRequestError, match="lasts 61 s; at most 60 s"):
        reader.decode(file_of(noise(61.0, 4_000), rate=4_000), RATE)


def processes() -> list[psutil.Process]:
    own = psutil.Process().children()
    return [child for child in own if "app.media.audio.sound_process" in " ".join(child.cmdline())]


def test_a_piece_is_heard_while_the_only_decoding_process_is_taken() -> None:
    others = processes()
    reader = SoundReader(MediaConfig(decode_timeout_s=limits.patience_s(), max_decoders=1), b"key")
    try:
        piece = Piece(reader.decode(file_of(noise(0.1)), RATE).samples, 0.0, 0.1)
        (process,) = (one for one in processes() if one not in others)
        process.suspend()
        with ThreadPoolExecutor(1) as threads:
            decoding = threads.submit(reader.decode, file_of(noise(0.2)), RATE)
            try:
                assert len(reader.features(piece, SETTINGS)) == 4 * 80 * 3_000
                assert not decoding.done()
            finally:
                process.resume()
            assert decoding.result(limits.patience_s()).seconds == pytest.approx(0.2)
    finally:
        reader.close()


def test_a_file_that_is_left_midway_is_forgotten(reader: SoundReader) -> None:
    length_s = ANSWER_BYTES / 2 / RATE + 10.0  # two answers
    for index, count in enumerate((1, 2)):
        with closing(reader.blocks(file_of(noise(length_s, seed=index)), RATE)) as blocks:
            for _ in range(count):
                next(blocks)
        said, left = reader._decoding.ask({"do": "more"}, b"", limits.patience_s())
        assert (said, len(left)) == ({}, 0)
    assert reader.decode(file_of(noise(0.1)), RATE).seconds == pytest.approx(0.1)


def test_a_process_that_is_lost_is_replaced(reader: SoundReader) -> None:
    reader.decode(file_of(noise(0.1)), RATE)
    for child in processes():
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert reader.decode(file_of(noise(0.1)), RATE).seconds == pytest.approx(0.1)


def test_what_takes_too_long_is_refused() -> None:
    reader = SoundReader(MediaConfig(decode_timeout_s=limits.scaled_s(0.02), max_decoders=1), b"key")
    silence = file_of(np.zeros((3_600 * 16_000, 1), np.float32), "FLAC")
    try:
        with pytest.raises((InvalidRequestError, OverloadedError), match=r"is too much work|too busy"):
            reader.decode(silence, RATE)
    finally:
        reader.close()


def test_what_takes_too_much_memory_is_refused() -> None:
    config = MediaConfig(decode_memory_bytes=64 << 20, decode_timeout_s=limits.patience_s(), max_decoders=1)
    reader = SoundReader(config, b"key")
    try:
        with pytest.raises(InvalidRequestError, match="takes more than 64 MiB"):
            reader.decode(wav(bytes(65 << 20)), RATE)
        hour = file_of(np.zeros((3_600 * 4_000, 1), np.float32), "FLAC", rate=4_000)  # 110 MiB, and never all at once
        assert reader.decode(hour, RATE).seconds == 3_600
    finally:
        reader.close()


def test_samples_come_as_they_are_decoded(reader: SoundReader) -> None:
    """Their decoder waits for who takes them; given up midway, it is there for the next file."""
    wave = file_of(noise(55.0))
    blocks = [*reader.blocks(wave, RATE)]
    assert len(blocks) > 1
    assert all(ANSWER_BYTES <= block.nbytes < 2 * ANSWER_BYTES for block in blocks[:-1])
    np.testing.assert_array_equal(np.concatenate(blocks), reader.decode(wave, RATE).samples)
    for _ in range(2):
        with closing(reader.blocks(wave, RATE)) as begun:
            np.testing.assert_array_equal(next(begun), blocks[0])
    assert reader.decode(file_of(noise(0.1)), RATE).seconds == pytest.approx(0.1)


def test_a_file_that_breaks_off_is_refused_where_it_does(reader: SoundReader) -> None:
    wave = noise(55.0)
    wave[-1] = np.nan
    blocks = reader.blocks(file_of(wave, subtype="FLOAT"), RATE)
    assert len(next(blocks))
    with pytest.raises(InvalidRequestError, match="no numbers"):
        next(blocks)


def test_the_time_of_a_file_is_that_of_all_its_answers() -> None:
    reader = SoundReader(MediaConfig(decode_timeout_s=limits.scaled_s(0.1), max_decoders=1), b"key")
    silence = file_of(np.zeros((7_200 * 8_000, 1), np.float32), "FLAC", rate=8_000)
    try:
        with pytest.raises((InvalidRequestError, OverloadedError), match=r"is too much work|too busy"):
            for _ in reader.blocks(silence, RATE):
                pass
    finally:
        reader.close()
