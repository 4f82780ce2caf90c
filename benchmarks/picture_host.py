"""What the host does for a picture before an engine sees it, in CPU time: here, and in the process that decodes.

    python -m benchmarks.picture_host [--side 1024] [--count 60]

Each picture is a file of its own, for Qwen3-VL; the last row is a file that was read before.
"""

from __future__ import annotations

import argparse
import io
import os
import time

import numpy as np
import psutil
from PIL import Image

from app.config.media import MediaConfig
from app.media.processors.qwen_vl import QwenVLProcessor
from app.media.reader import MediaReader

SETTINGS = {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}


def files(kind: str, side: int, count: int) -> list[bytes]:
    """Pictures of coarse noise as files."""
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), np.uint8))
        out = io.BytesIO()
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(out, kind)
        found.append(out.getvalue())
    return found


def measure(reader: MediaReader, shown: list[bytes]) -> tuple[float, float]:
    """CPU milliseconds a picture: this process, those that it started."""
    processor = QwenVLProcessor({**QwenVLProcessor.settings_of(SETTINGS, {}), "placeholder": "x"})
    own, others = time.process_time(), _of_children()
    for data in shown:
        reader.read(data, "qwen_vl", processor)
    each = 1e3 / len(shown)
    return (time.process_time() - own) * each, (_of_children() - others) * each


def _of_children() -> float:
    times = (child.cpu_times() for child in psutil.Process(os.getpid()).children())
    return sum(spent.user + spent.system for spent in times)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024, help="Pixels of a picture's side.")
    parser.add_argument("--count", type=int, default=60, help="Pictures of each format.")
    args = parser.parse_args()
    for kind in ("JPEG", "PNG", "WEBP"):
        reader = MediaReader(MediaConfig(max_decoders=1), b"a key for benchmarks")
        first, *rest = files(kind, args.side, args.count + 1)
        measure(reader, [first])  # the process starts
        rows = {kind: rest, f"{kind} again": [rest[-1]] * args.count}
        for name, shown in rows.items():
            own, decoding = measure(reader, shown)
            print(f"{name:10} {own:6.2f} ms here, {decoding:6.2f} ms where it is decoded", flush=True)
        reader.close()


if __name__ == "__main__":
    main()
