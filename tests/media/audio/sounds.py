"""Sounds for the tests, made on the fly: smooth noise and silence, as files of every kind that is read."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

soundfile = pytest.importorskip("soundfile", reason="the extra `audio` is not installed")
soxr = pytest.importorskip("soxr", reason="the extra `audio` is not installed")
av = pytest.importorskip("av", reason="the extra `audio` is not installed")

RATE = 16_000
Floats = npt.NDArray[np.float32]


def noise(seconds: float, rate: int = RATE, seed: int = 0, channels: int = 1) -> Floats:
    """Noise below 1 kHz, whose loudness goes up and down: [samples, channels]."""
    rng = np.random.default_rng([seed, rate, channels])
    size = round(seconds * rate)
    spectrum = np.fft.rfft(rng.standard_normal((size, channels)), axis=0)
    spectrum[np.fft.rfftfreq(size, 1 / rate) > 1_000] = 0
    wave = np.fft.irfft(spectrum, size, axis=0)
    swell = 0.6 + 0.4 * np.sin(np.arange(size) / rate * 2)[:, None]
    return (0.5 * swell * wave / np.abs(wave).max()).astype(np.float32)


def whole_numbers(samples: Floats) -> npt.NDArray[np.int16]:
    """The same in 16 bits, which files of every kind without loss hold as they are."""
    return np.clip(np.rint(samples * 32_768), -32_768, 32_767).astype(np.int16)


def file_of(
    samples: Floats | npt.NDArray[np.int16], kind: str = "WAV", rate: int = RATE, subtype: str | None = None
) -> bytes:
    """A sound as a file of libsndfile's."""
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind, subtype=subtype)
    return out.getvalue()


def container_of(samples: Floats, kind: str, codec: str, rate: int = 48_000) -> bytes:
    """A sound as a file of ffmpeg's."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        layout = "mono" if samples.shape[1] == 1 else "stereo"
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout=layout)
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return out.getvalue()


def video(kind: str = "mp4", codec: str = "mpeg4", frames: int = 5) -> bytes:
    """A video without a sound."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 40 * i, np.uint8), format="rgb24")
            for packet in stream.encode(picture):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    return out.getvalue()


def wav(data: bytes, rate: int = RATE, channels: int = 1, bits: int = 16, tag: int = 1, size: Any = None) -> bytes:
    """A wav file by hand, which may lie about what it holds."""
    align = channels * bits // 8
    form = struct.pack("<HHIIHH", tag, channels, rate, (rate * align) & 0xFFFFFFFF, align & 0xFFFF, bits)
    body = b"WAVE" + chunk(b"fmt ", form) + chunk(b"data", data, size)
    return chunk(b"RIFF", body, None if size is None else min(0xFFFFFFFF, size + 36))


def chunk(name: bytes, data: bytes, size: Any = None) -> bytes:
    """A chunk of RIFF, of a size that may be a lie."""
    return name + struct.pack("<I", len(data) if size is None else size) + data
