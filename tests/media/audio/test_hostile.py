"""Sounds that are meant to do harm: each is refused by a readable error or is a sound, and memory stays."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from app.config.media import MediaConfig
from app.errors import InvalidRequestError
from app.media.audio.reader import SoundReader
from tests import limits
from tests.media.audio.hostile import MAX_S, Case, cases
from tests.media.audio.sounds import RATE, file_of, noise

CASES = cases()
MAX_GROWTH_BYTES = 64 << 20


@pytest.fixture(scope="module")
def reader() -> Iterator[SoundReader]:
    config = MediaConfig(decode_timeout_s=limits.patience_s(), max_decoders=1, max_sound_s=MAX_S)
    found = SoundReader(config, b"key")
    yield found
    found.close()


def test_there_are_many() -> None:
    assert len(CASES) >= 60
    assert len({name for name, _, _ in CASES}) == len(CASES)


@pytest.mark.parametrize("start", range(0, len(CASES), 10))
def test_each_is_refused_or_a_sound(reader: SoundReader, start: int) -> None:
    for case in CASES[start : start + 10]:
        _check(reader, case)


def _check(reader: SoundReader, case: Case) -> None:
    name, data, is_refused = case
    said, seconds = "", 0.0
    try:
        seconds = reader.decode(data, RATE).seconds
    except InvalidRequestError as error:
        said = error.message
    assert bool(said) == is_refused, (name, said, seconds)
    if said:
        assert 15 < len(said) < 400, (name, said)
        assert not [word for word in ("0x", "Errno", "Traceback") if word in said], (name, said)
    else:
        assert 0 < seconds <= MAX_S, name


def test_memory_stays(reader: SoundReader) -> None:
    """That of the server and of all that decode for it, over what one good sound takes."""

    def resident() -> int:
        own = psutil.Process()
        return int(sum(process.memory_info().rss for process in (own, *own.children())))

    good = file_of(noise(10.0))
    reader.decode(good, RATE)
    before = resident()
    for case in CASES:
        if any(word in case[0] for word in ("says", "bomb", "huge", "many", "silence", "61 s")):
            _check(reader, case)
    assert resident() - before < MAX_GROWTH_BYTES
    assert reader.decode(good, RATE).seconds == 10.0
