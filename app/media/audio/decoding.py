"""A sound file's samples: mixed to one channel, at the rate that a model hears. Runs in a process that may be killed.

Samples are checked and counted as they come, so that what a header says or leaves out costs nothing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt


def _library(name: str) -> Any:
    """One of the extra `audio`, loaded now, as the process opens no files later. None where it is not installed: who
    asks has looked."""
    return None if find_spec(name) is None else import_module(name)


av, soundfile, soxr = map(_library, ("av", "soundfile", "soxr"))
Floats = npt.NDArray[np.float32]
MIN_RATE, MAX_RATE = 4_000, 384_000
MAX_CHANNELS = 8
# Samples of all channels that are decoded for each second a sound may last: two channels of 48 kHz.
SAMPLES_PER_S = 96_000
_BLOCK = 1 << 16
_FULL = 32_768
_NAMES = {"matroska": "webm", "opus": "ogg"}  # what the format is called to users
_DEMUXERS = {"mp4": "mp4", "matroska": "matroska", "opus": "ogg"}  # ffmpeg's names of the formats that it reads
_NUMBER = re.compile(r"^\[Errno \d+\] |^(Internal e|E)rror ?: ")


class DecodingError(Exception):
    """The file is not what its header promised."""


@dataclass(slots=True, frozen=True)
class SoundBounds:
    """Bounds one sound: the rate it is brought to, and how long it may last."""

    rate: int
    max_s: float

    @property
    def max_samples(self) -> int:
        """Most samples of all channels that are decoded."""
        return int(self.max_s * SAMPLES_PER_S)

    def check(self, seconds: float) -> None:
        """DecodingError for a sound that is too long."""
        if seconds > self.max_s:
            raise DecodingError(f"lasts {seconds:.0f} s; at most {self.max_s:g} s")


def decode(data: bytes, kind: str, bounds: SoundBounds) -> Iterator[bytes]:
    """The samples of a file of this kind, as int16, block by block. DecodingError says what is wrong with it."""
    try:
        yield from _decode(data, kind, bounds)
    except (MemoryError, DecodingError):
        raise
    except Exception as error:  # libraries raise of their own, and the process is one that may die
        raise DecodingError(f"is a malformed {_NAMES.get(kind, kind)}: {_reason(error)}") from error


def _decode(data: bytes, kind: str, bounds: SoundBounds) -> Iterator[bytes]:
    blocks = _av_blocks(data, _DEMUXERS[kind], bounds) if kind in _DEMUXERS else _soundfile_blocks(data, bounds)
    num_samples = first_rate = num_kept = 0
    resampler: Any = None
    for rate, block in blocks:
        if not first_rate:
            first_rate = rate
            resampler = soxr.ResampleStream(rate, bounds.rate, 1) if rate != bounds.rate else None
        elif rate != first_rate:
            raise DecodingError(f"changes its sampling rate from {first_rate} to {rate}")
        num_samples += block.size
        if num_samples > bounds.max_samples:
            raise DecodingError(f"has more than {bounds.max_samples} samples in all channels")
        mono = block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise DecodingError("has samples that are no numbers")
        made = mono if resampler is None else resampler.resample_chunk(mono)
        num_kept += len(made)
        bounds.check(num_kept / bounds.rate)
        yield _int16(made)
    if resampler is not None:
        made = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        num_kept += len(made)
        yield _int16(made)
    if not num_kept:
        raise DecodingError("is empty: it has no samples")


def _int16(samples: Floats) -> bytes:
    return np.clip(np.rint(samples * _FULL), -_FULL, _FULL - 1).astype("<i2").tobytes()


def _soundfile_blocks(data: bytes, bounds: SoundBounds) -> Iterator[tuple[int, Floats]]:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        _check_form(file.samplerate, file.channels)
        if file.seekable() and 0 < file.frames < 1 << 62:
            bounds.check(file.frames / file.samplerate)
        frames = max(1, _BLOCK // file.channels)
        while len(block := file.read(frames, dtype="float32", always_2d=True)):
            yield file.samplerate, block


def _av_blocks(data: bytes, demuxer: str, bounds: SoundBounds) -> Iterator[tuple[int, Floats]]:
    """Blocks of the first stream of sound. The format is given, so that ffmpeg tries no other."""
    with av.open(io.BytesIO(data), format=demuxer, metadata_errors="ignore") as container:
        if not container.streams.audio:
            what = "a video without sound" if container.streams.video else "a container without sound"
            raise DecodingError(f"is {what}")
        if container.duration is not None:
            bounds.check(container.duration / av.time_base)
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        gathered, form = av.AudioFifo(), None  # frames are short, and each costs its turn through Python
        for frame in container.decode(stream):
            own = frame.sample_rate, frame.layout.nb_channels, frame.format.name
            if own != form:
                _check_form(*own[:2])
                yield from _floats(gathered)
                gathered, form = av.AudioFifo(), own
            frame.pts = None  # or gaps between frames become silence
            gathered.write(frame)
            if gathered.samples * own[1] >= _BLOCK:
                yield from _floats(gathered)
        yield from _floats(gathered)


def _floats(gathered: Any) -> Iterator[tuple[int, Floats]]:
    """All samples of equal frames; nothing where there are none."""
    whole = gathered.read() if gathered.samples else None
    if whole is not None:
        for one in av.AudioResampler(format="fltp").resample(whole):
            yield one.sample_rate, one.to_ndarray().T


def _check_form(rate: int, channels: int) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DecodingError(f"has {rate} samples a second; from {MIN_RATE} to {MAX_RATE}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise DecodingError(f"has {channels} channels; from 1 to {MAX_CHANNELS}")


def _reason(error: Exception) -> str:
    said = _NUMBER.sub("", str(error).rpartition(">: ")[2].partition(": '<")[0]).rstrip(".")
    return f"{said:.120}" if said and "0x" not in said else type(error).__name__
