"""Videos for the tests, made on the fly: a colour that changes with time and runs over the frame, as files of every
kind that is read."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

av = pytest.importorskip("av", reason="the extra `audio` is not installed")

Frames = npt.NDArray[np.uint8]


def frames(count: int, width: int = 64, height: int = 48) -> Frames:
    """Smooth frames [count, H, W, 3], each unlike the others."""
    rows, columns = np.mgrid[0:height, 0:width]
    found = []
    for i in range(count):
        red = 40 + (i * 37) % 180 + 0 * rows
        found.append(np.stack([red, rows * 200 // height + 20, (columns * 200 // width + i * 11) % 256], axis=2))
    return np.asarray(found, np.uint8)


def file_of(
    shown: Frames, kind: str = "mp4", codec: str = "libx264", rate: int = 8, sound_s: float = 0.0, **options: str
) -> bytes:
    """A video as a file of ffmpeg's; with a sound of so many seconds beside it."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, options={"threads": "1", **options})
        stream.width, stream.height = shown.shape[2], shown.shape[1]
        stream.pix_fmt = "yuv420p"
        if sound_s:
            _add_sound(container, "aac" if kind == "mp4" else "libopus", sound_s)
        for one in shown:
            for packet in stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    return out.getvalue()


def _add_sound(container: Any, codec: str, seconds: float) -> None:
    stream = container.add_stream(codec, rate=48_000, layout="mono")
    samples = np.sin(np.arange(round(seconds * 48_000)) / 20)[None].astype(np.float32)
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
    frame.sample_rate = 48_000
    resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=48_000)
    for one in resampler.resample(frame):
        for packet in stream.encode(one):
            container.mux(packet)
    for packet in stream.encode(None):
        container.mux(packet)


def decoded(data: bytes) -> Frames:
    """All frames of a file, by PyAV's shortest way."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
