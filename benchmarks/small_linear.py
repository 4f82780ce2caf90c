"""Products of few rows on a GPU: every tile of app/kernels/gemm/triton_small.py beside cuBLAS, for the linear layers of
some models; what the table in small_tiles.py was read off. On Hopper GPUs also what app/kernels/gemm/plain.py takes for
those that it serves (`early`).

    python -m benchmarks.small_linear [--rows 1 8 16 32 64 128] [--jobs 14] [--out results/small_linear.json]

Each product is the one that a decoder layer runs: of a deferred norm, of one with the activation, or added to the
residual. Beside it stand the launches that it replaces: cuBLAS and the activation; cuBLAS, then residual and norm.
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
from app.kernels.gemm import DeferredNorm, plain
from app.kernels.gemm.small_tiles import SmallTile, deferred_tile, gated_tile, split_tile, whole_tile
from app.kernels.gemm.triton_small import small_linear, small_linear_add
from app.kernels.kernel_table import HOPPER
from benchmarks.roofline import BANDWIDTH

# name -> (columns, K, kind)
LAYERS = {
    "qwen qkv": (4096, 1024, "late"), "qwen o": (1024, 2048, "add"), "qwen gate_up": (3072, 1024, "gated"),
    "qwen down": (1024, 3072, "add"), "qwen head": (151936, 1024, "whole"), "llama qkv": (6144, 4096, "late"),
    "llama o": (4096, 4096, "add"), "llama gate_up": (14336, 4096, "gated"), "llama down": (4096, 14336, "add"),
    "llama head": (128256, 4096, "whole"), "phi4 qkv": (7680, 5120, "late"), "phi4 o": (5120, 5120, "add"),
    "phi4 gate_up": (17920, 5120, "gated"), "phi4 down": (5120, 17920, "add"),
    "qwen3.5 in": (12352, 2560, "late"), "qwen3.5 qkv": (10240, 2560, "late"), "qwen3.5 o": (2560, 4096, "add"),
    "qwen3.5 gate_up": (9216, 2560, "gated"), "qwen3.5 down": (2560, 9216, "add"),
    "qwen30a3b qkv": (5120, 2048, "late"), "qwen30a3b o": (2048, 4096, "add"), "dsv2lite o": (2048, 2048, "add"),
}  # fmt: skip
KINDS = ("whole", "late", "gated", "add")  # gated: of a deferred norm, too
COLD_BYTES = 200e6
SHARED_BYTES = 220 << 10
SQUARES = 64  # shares of a deferred norm's sums
EPS = 1e-6
TABLE: dict[str, Callable[[int, int, int], SmallTile | None]] = {
    "whole": whole_tile, "late": deferred_tile, "gated": partial(gated_tile, is_deferred=True), "add": split_tile,
}  # fmt: skip
Call = Callable[[int], object]  # takes i: a product with copy i of the weight


def tiles(rows: int, kind: str) -> list[SmallTile]:
    """All that fit. A stage holds a tile of x and one of the weight; gated: of gate and of up."""
    columns = (16, 32, 64) if rows <= 32 else (16, 32, 64, 128) if rows <= 64 else (32, 64, 128)
    sizes = itertools.product(columns, (64, 128, 256), (4, 8), (3, 4, 5))
    height, num_weights = max(16, triton.next_power_of_2(rows)), 2 if kind == "gated" else 1
    return [
        SmallTile(*size)
        for size in sizes
        if (num_weights * size[0] + height) * size[1] * 2 * size[3] <= SHARED_BYTES and (size[2] == 4 or size[0] >= 64)
    ]


def compile_one(job: tuple[int, SmallTile, str]) -> None:
    """Leave a kernel in Triton's cache on disk."""
    rows, tile, kind = job
    size = 2048
    x = torch.zeros(rows, size, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(2 * 3072, size, dtype=torch.bfloat16, device="cuda")
    for splits in (1, 2, 4, 8) if kind == "add" else (1,):
        if size % (tile.depth * splits):
            continue
        try:
            product(Case(kind, x, [weight]), replace(tile, splits=splits), 0)
        except triton.runtime.errors.OutOfResources:
            return


class Case:
    """Inputs of one kind of product."""

    def __init__(self, kind: str, x: torch.Tensor, weights: list[torch.Tensor]) -> None:
        self.kind, self.x, self.weights = kind, x, weights
        squares = torch.zeros(len(x), SQUARES, device=x.device)
        squares[:, 0] = x.float().square().sum(1)
        self.deferred = DeferredNorm(x, squares, EPS)
        self.residual = torch.zeros(len(x), len(weights[0]), dtype=x.dtype, device=x.device)
        self.norm = torch.ones_like(self.residual[0])


def product(case: Case, tile: SmallTile, i: int) -> torch.Tensor:
    """Ours."""
    weight = case.weights[i]
    if case.kind == "add":
        return small_linear_add(case.x, weight, None, case.residual, tile, (case.norm, EPS))[1]
    is_gated, x = case.kind == "gated", case.x if case.kind == "whole" else case.deferred
    return small_linear(x, weight, None, tile, "silu" if is_gated else None, is_gated=is_gated)


def graph_us(call: Call, copies: int) -> float:
    """Microseconds of one launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes what the calls read
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


def library(case: Case, x: torch.Tensor, i: int) -> torch.Tensor:
    """cuBLAS and what is left to do."""
    out = F.linear(x, case.weights[i])
    if case.kind == "add":
        return fused.add_rms_norm(out, case.residual, case.norm, EPS)[1]
    return fused.act_and_mul(out, "silu") if case.kind == "gated" else out


def early_us(case: Case, copies: int) -> float | None:
    """The product whose weight comes before its rows; None: this GPU has none, or not of this one."""
    if case.kind == "whole" or not HOPPER.are_met(case.x.device):
        return None
    is_gated, adds = case.kind == "gated", case.kind == "add"
    x = case.x if adds else case.deferred
    tile = plain.plain_tile(x, case.weights[0], is_gated=is_gated, splits_up=adds)
    if tile is None:
        return None
    follows: dict[str, Any] = {"residual": case.residual, "norm": (case.norm, EPS)} if adds else {}
    follows |= {"activation": "silu"} if is_gated else {}
    return graph_us(lambda i: plain.plain_linear(x, case.weights[i], None, tile, **follows), copies)


def measure(name: str, rows: int) -> dict[str, Any]:
    """One layer and number of rows: cuBLAS and the best tiles."""
    columns, size, kind = LAYERS[name]
    height = columns * (2 if kind == "gated" else 1)
    weight_bytes = height * size * 2
    copies = max(1, int(COLD_BYTES / weight_bytes) + 1)
    weights = [torch.randn(height, size, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
    case = Case(kind, torch.randn(rows, size, dtype=torch.bfloat16, device="cuda"), weights)
    found: list[tuple[float, SmallTile]] = []
    for tile in tiles(rows, kind):
        for splits in (1, 2, 4, 8):
            programs = triton.cdiv(columns, tile.columns) * splits
            if size % (tile.depth * splits) or (splits > 1 and (kind != "add" or programs > 1056)):
                continue
            if programs < 32:
                continue
            chosen = replace(tile, splits=splits)
            try:
                found.append((graph_us(partial(product, case, chosen), copies), chosen))
            except triton.runtime.errors.OutOfResources:
                break
    found.sort(key=lambda pair: pair[0])
    taken = TABLE[kind](rows, columns, size)
    whole = [pair for pair in found if pair[1].splits == 1]
    base = graph_us(partial(library, case, case.x), copies)
    row = {
        "layer": name, "rows": rows, "floor_us": 1e6 * weight_bytes / BANDWIDTH, "cublas_us": base,
        "taken_us": base if taken is None else graph_us(partial(product, case, taken), copies),
        "early_us": early_us(case, copies), "best_us": found[0][0],
        "best": [{"us": us, **asdict(tile)} for us, tile in found[:6]],
        "best_whole": [{"us": us, **asdict(tile)} for us, tile in whole[:4]],
    }  # fmt: skip
    expected = library(case, case.deferred.materialize() if kind in ("late", "gated") else case.x, 0).float()
    out = product(case, found[0][1], 0).float()
    row["relative_error"] = float((out - expected).norm() / expected.norm())
    return row


def main() -> None:
    """Compile beside each other, time one after another, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS))
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    heights = {max(16, triton.next_power_of_2(rows)): rows for rows in args.rows}
    jobs = [(rows, tile, kind) for rows in heights.values() for kind in KINDS for tile in tiles(rows, kind)]
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
            f"{name:14s} T={rows:3d} floor {row['floor_us']:6.2f} cublas {row['cublas_us']:6.2f} "
            f"taken {row['taken_us']:6.2f} early {row['early_us'] or float('nan'):6.2f} best "
            f"{row['best_us']:6.2f} ({sizes}) whole {whole:6.2f} err {row['relative_error']:.1e}",
            flush=True,
        )
        torch.cuda.empty_cache()
        if args.out is not None:
            args.out.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
