"""Products of few rows on a GPU: every tile of app/kernels/gemm/triton_small.py beside cuBLAS, for the linear layers of
two models; what its table of tiles was read off.

    python -m benchmarks.small_linear [--rows 1 8 32 64] [--jobs 14] [--out results/small_linear.json]

Times are those inside a CUDA graph of dependent launches over so many copies of the weight that none is in a cache, as
in a decode step. The floor is the weight's bytes at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import triton

from app.kernels.fused import triton_ops as fused
from app.kernels.gemm.triton_small import SmallTile, small_linear
from benchmarks.roofline import BANDWIDTH

# name -> (columns, K, gated)
LAYERS = {
    "qwen qkv": (4096, 1024, False), "qwen o": (1024, 2048, False), "qwen gate_up": (3072, 1024, True),
    "qwen down": (1024, 3072, False), "qwen head": (151936, 1024, False), "llama qkv": (6144, 4096, False),
    "llama o": (4096, 4096, False), "llama gate_up": (14336, 4096, True), "llama down": (4096, 14336, False),
    "llama head": (128256, 4096, False),
}  # fmt: skip
COLD_BYTES = 200e6
SHARED_BYTES = 220 << 10
Call = Callable[[int], object]  # of copy i of the weight


def tiles(rows: int) -> list[SmallTile]:
    """All that fit."""
    columns = (16, 32, 64) if rows <= 32 else (32, 64, 128)
    sizes = itertools.product(columns, (64, 128, 256), (4, 8), (3, 5))
    height = max(16, rows)
    return [
        SmallTile(*size)
        for size in sizes
        if (size[0] + height) * size[1] * 2 * size[3] <= SHARED_BYTES and (size[2] == 4 or size[0] >= 64)
    ]


def compile_one(job: tuple[int, SmallTile, bool]) -> None:
    """Leave a kernel in Triton's cache on disk."""
    rows, tile, gated = job
    x = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(2 * 3072, 1024, dtype=torch.bfloat16, device="cuda")
    for splits in (1, 2):
        try:
            small_linear(x, weight, None, replace(tile, splits=splits), gated=gated)
        except triton.runtime.errors.OutOfResources:
            return


def graph_us(call: Call, copies: int) -> float:
    """Microseconds of one launch."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(max(16, copies)):
                call(i % copies)
        graph.replay()
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * median(times) / max(16, copies)


def library(x: torch.Tensor, weights: list[torch.Tensor], gated: bool, i: int) -> torch.Tensor:
    """cuBLAS and, of a gated layer, the activation."""
    out = F.linear(x, weights[i])
    return fused.silu_and_mul(out) if gated else out


def measure(name: str, rows: int) -> dict[str, Any]:
    """One layer and number of rows: cuBLAS and the best tiles."""
    columns, size, gated = LAYERS[name]
    weight_bytes = columns * size * 2 * (1 + gated)
    copies = max(1, int(COLD_BYTES / weight_bytes) + 1)
    weights = [torch.randn((1 + gated) * columns, size, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
    x = torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")

    def ours(tile: SmallTile, i: int) -> torch.Tensor:
        return small_linear(x, weights[i], None, tile, gated=gated)

    found: list[tuple[float, SmallTile]] = []
    for tile in tiles(rows):
        for splits in (1, 2, 4, 8):
            programs = triton.cdiv(columns, tile.columns) * splits
            if size % (tile.depth * splits) or (gated and splits > 1) or (splits > 1 and programs > 1056):
                continue
            if programs < 32:
                continue
            chosen = replace(tile, splits=splits)
            try:
                found.append((graph_us(partial(ours, chosen), copies), chosen))
            except triton.runtime.errors.OutOfResources:
                break
    found.sort(key=lambda pair: pair[0])
    whole = [pair for pair in found if pair[1].splits == 1]
    base = graph_us(partial(library, x, weights, gated), copies)
    row = {
        "layer": name, "rows": rows, "floor_us": 1e6 * weight_bytes / BANDWIDTH, "cublas_us": base,
        "best_us": found[0][0], "best": [{"us": us, **asdict(tile)} for us, tile in found[:6]],
        "best_whole": [{"us": us, **asdict(tile)} for us, tile in whole[:4]],
    }  # fmt: skip
    expected = library(x, weights, gated, 0).float()
    out = ours(found[0][1], 0)
    out = out.sum(0) if out.dim() == 3 else out
    row["relative_error"] = float((out.float() - expected).norm() / expected.norm())
    return row


def main() -> None:
    """Compile beside each other, time one after another, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS))
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    heights = {max(16, triton.next_power_of_2(rows)): rows for rows in args.rows}
    jobs = [(rows, tile, gated) for rows in heights.values() for tile in tiles(rows) for gated in (False, True)]
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs, chunksize=4))
    print(f"{len(jobs)} kernels compiled", flush=True)
    table = []
    for name, rows in itertools.product(args.layers, args.rows):
        try:
            row = measure(name, rows)
        except Exception as error:  # the others are still worth it
            print(f"{name} {rows}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        table.append(row)
        best = row["best"][0]
        sizes = "/".join(str(best[key]) for key in ("columns", "depth", "num_warps", "num_stages", "splits"))
        whole = row["best_whole"][0]["us"] if row["best_whole"] else float("nan")
        print(
            f"{name:14s} T={rows:3d} floor {row['floor_us']:6.2f} cublas {row['cublas_us']:6.2f} ours "
            f"{row['best_us']:6.2f} ({sizes}) whole {whole:6.2f} err {row['relative_error']:.1e}",
            flush=True,
        )
        torch.cuda.empty_cache()
        if args.out is not None:
            args.out.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
