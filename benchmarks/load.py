"""Seconds in which a model's weights come from their files onto the device, against plain reads of the same files.

    python -m benchmarks.load DIRECTORY ... [--device cuda] [--dtype bfloat16] [--rounds 3] [--from-disk] [--out FILE]

Plain reads are `dd`'s: 8 MiB at a time into one buffer, by one thread. Both in turn, from the page cache, or with
`--from-disk` after the files were dropped from it. CPU seconds are this process's, which says more on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups
from app.layers.context import BuildContext
from app.loading.loader import fill_model
from app.worker.attention.backend import select_attention
from app.worker.device import DTYPES
from benchmarks.offline import write

READ_BYTES = 8 << 20


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def plain_read(files: list[Path]) -> None:
    """Read all files as dd does."""
    buffer = bytearray(READ_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def drop(files: list[Path]) -> None:
    """Out of the page cache."""
    os.sync()
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(directory: Path, device: torch.device, dtype: torch.dtype, rounds: int, from_disk: bool) -> dict[str, Any]:
    """Best of `rounds` of each, in turn."""
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in directory.glob(kind))
    size = sum(file.stat().st_size for file in files)
    info, ops = ModelInfo.from_directory(str(directory)), select_attention("torch", device)[0]
    ctx = BuildContext(dtype, device, 64, ops, ParallelGroups())

    def load() -> None:
        with torch.inference_mode():
            fill_model(info, ctx, "auto", 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    calls: dict[str, Callable[[], object]] = {"plain": lambda: plain_read(files), "load": load}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if from_disk:
                drop(files)
            taken[name].append(timed(call))
    figures: dict[str, Any] = {"directory": directory.name, "bytes": size, "taken": taken}
    for name, times in taken.items():
        seconds = min(seconds for seconds, _ in times)
        cpu_s = min(cpu_s for _, cpu_s in times)
        figures[name] = {"seconds": seconds, "gb_per_s": size / seconds / 1e9, "cpu_s": cpu_s}
        print(
            f"{directory.name} {name}: {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s, {cpu_s:.2f} CPU s", flush=True
        )
    return figures


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--from-disk", action="store_true", help="drop the files from the page cache before each read")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    if device.type == "cuda":
        torch.zeros(1, device=device)  # not part of loading
    figures = [measure(path, device, dtype, args.rounds, args.from_disk) for path in args.directories]
    write(args.out, {"dtype": args.dtype, "from_disk": args.from_disk, "loads": figures})


if __name__ == "__main__":
    main()
