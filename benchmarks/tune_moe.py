"""Tiles of the experts' grouped products on a GPU, tried one after another: what app/kernels/moe/tiles.py was read off.

    python -m benchmarks.tune_moe --shape qwen3-30b-a3b [--tokens 1 8 32 ...] [--jobs 14] [--out results/tune_moe.json]
    python -m benchmarks.tune_moe --sizes E K I C          # of any other model

Routing is uniform. Times are those inside a CUDA graph over several sets of ids, so that no weight is in a cache. Every
tile's result is compared with PyTorch's before its time counts. The table gives the best tiles, their share of the
bandwidth by the bytes of the experts that were chosen, and their TFLOP/s.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from app.kernels.moe import GLU
from app.kernels.moe.tiles import MOST_SCANNED
from app.kernels.moe.triton_grouped import GroupedTile, Product, scan_product, sorted_product
from app.kernels.moe.triton_sort import sort_pairs
from benchmarks.roofline import BANDWIDTH

# E, K, I, C
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 768, 2048),
    "deepseek-v2-lite": (66, 8, 1408, 2048),  # 64 and 6, and two shared ones that every token goes through
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
TOKENS = (1, 8, 32, 128, 256, 512, 2048, 8192)
SHARED_BYTES = 224 << 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there only to be tried out, in the interpreter
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
GATED, DOWN = "gate_up", "down"


@dataclass(frozen=True)
class Sizes:
    """A layer and its tokens."""

    experts: int
    top_k: int
    intermediate: int
    hidden: int
    tokens: int

    def product(self, kind: str) -> tuple[int, int]:
        """(columns of the result, K)."""
        return (self.intermediate, self.hidden) if kind == GATED else (self.hidden, self.intermediate)


def tiles(sizes: Sizes, kind: str) -> Iterator[tuple[GroupedTile, bool]]:
    """What is tried: (tile, whether pairs are sorted)."""
    pairs = sizes.tokens * sizes.top_k
    rows, parts = pairs / sizes.experts, 2 if kind == GATED else 1
    found: set[GroupedTile] = set()
    if rows <= 4:
        wide = [16, 32, 64] if kind == GATED else [16, 32, 64, 128]
        found |= {GroupedTile(16, *t) for t in itertools.product(wide, (64, 128, 256), (4,), (3, 5))}
        found |= {GroupedTile(16, *t, swap=True) for t in itertools.product((64, 128), (64, 128), (4,), (3, 5))}
        found |= {
            GroupedTile(16, *t, swap=True, tma=True) for t in itertools.product((64, 128), (64, 128), (4,), (3, 5))
        }
    elif rows <= 96:
        heights = [h for h in (16, 32, 64) if h <= 4 * rows]
        sizes_ = list(itertools.product(heights, (64, 128), (64, 128), (4,), (3, 5)))
        found |= {GroupedTile(*t, swap=True) for t in sizes_} | {GroupedTile(*t, swap=True, tma=True) for t in sizes_}
        found |= {GroupedTile(*t) for t in itertools.product(heights, (32, 64), (128,), (4,), (3, 4))}
        found |= {GroupedTile(64, *t, tma=True) for t in itertools.product((64, 128), (64,), (4, 8), (3, 4))}
    if rows > 64:
        for rest in itertools.product((64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4)):
            if rest[0] * rest[1] * parts in (64 * 256, 128 * 256, 128 * 128) and (rest[3] == 8 or rest[0] < 128):
                found |= {GroupedTile(*rest, tma=tma, programs=p) for tma, p in ((False, 0), (True, 0), (True, 1))}
    for tile in sorted(found, key=str):
        height = tile.rows + tile.columns * parts
        if height * tile.depth * 2 * tile.num_stages <= SHARED_BYTES and (height * tile.depth * 2 >= 4096):
            if pairs <= MOST_SCANNED:
                yield tile, False
            if pairs > MOST_SCANNED // 2:
                yield tile, True


class Case:
    """One product's inputs: one weight, several routings."""

    def __init__(self, sizes: Sizes, kind: str, sets: int, *, is_small: bool = False) -> None:
        self.sizes, self.kind = sizes, kind
        columns, size = sizes.product(kind)
        if is_small:  # the same to the compiler
            columns, size = columns % 512 + 512, size % 512 + 512
        self.columns, self.size = columns, size
        height = columns * (2 if kind == GATED else 1)
        weight = torch.empty(sizes.experts, height, size, dtype=DTYPE, device=DEVICE)
        for one in weight:
            one.copy_(torch.randn(height, size, device=DEVICE) * size**-0.5)
        self.per_row = sizes.top_k if kind == GATED else 1
        count = sizes.tokens * sizes.top_k // self.per_row
        self.x = torch.randn(count, size, device=DEVICE).to(DTYPE)
        self.ids = [
            torch.rand(sizes.tokens, sizes.experts, device=DEVICE).topk(sizes.top_k).indices.int() for _ in range(sets)
        ]
        self.product = Product(weight, None, GLU() if kind == GATED else None)
        self.pairs = {}

    def run(self, tile: GroupedTile, is_sorted: bool, i: int) -> torch.Tensor:
        """The product over routing i; sorting is not part of it. The down product reads and gives any order."""
        if not is_sorted:
            return scan_product(self.product, self.x, self.ids[i], self.per_row, tile)
        if (tile.rows, i) not in self.pairs:
            self.pairs[tile.rows, i] = sort_pairs(self.ids[i], self.sizes.experts, tile.rows)
        options = {"out_sorted": True} if self.kind == GATED else {"x_sorted": True}
        return sorted_product(self.product, self.x, self.pairs[tile.rows, i], self.per_row, tile, **options)

    def truth(self, is_sorted: bool) -> torch.Tensor:
        """Routing 0 by PyTorch, expert by expert, in fp32 accumulation."""
        ids = self.ids[0].flatten()
        order = ids.argsort(stable=True)
        out = torch.empty(len(ids), self.columns, dtype=DTYPE, device=DEVICE)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=DEVICE)
        for expert in range(self.sizes.experts):
            mine = (ids == expert).nonzero()[:, 0]
            rows = mine // self.per_row if self.kind == GATED or not is_sorted else places[mine]
            y = F.linear(self.x[rows].float(), self.product.weight[expert].float())
            if self.kind == GATED:
                gate, up = y.chunk(2, dim=-1)
                y = F.silu(gate) * up
            out[places[mine] if self.kind == GATED and is_sorted else mine] = y.to(DTYPE)
        return out

    def distinct(self) -> float:
        """Mean number of experts that are chosen."""
        return sum(len(ids.unique()) for ids in self.ids) / len(self.ids)


def compile_some(jobs: list[tuple[Sizes, str, GroupedTile, bool]]) -> int:
    """Leave kernels in Triton's cache on disk."""
    failed = 0
    for sizes, kind, tile, is_sorted in jobs:
        try:
            Case(sizes, kind, 1, is_small=True).run(tile, is_sorted, 0)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception:  # measured, or reported, later
            failed += 1
    return failed


def graph_us(call: Callable[[int], object], sets: int) -> float:
    """Microseconds of one call."""
    if DEVICE == "cpu":
        began = time.perf_counter()
        call(0)
        return 1e6 * (time.perf_counter() - began)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes what the calls read
    with torch.cuda.stream(stream):
        for i in range(sets):
            call(i)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(sets):
                call(i)
        graph.replay()
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * median(times) / sets


def num_sets(tokens: int) -> int:
    """Routings of a case."""
    return 16 if tokens <= 8 else 8 if tokens <= 64 else 4 if tokens <= 512 else 2


def measure(sizes: Sizes, kind: str, deadline: float) -> dict[str, Any]:
    """All tiles of one product."""
    case = Case(sizes, kind, num_sets(sizes.tokens))
    truths = {is_sorted: case.truth(is_sorted).float() for is_sorted in (False, True)}
    found, failed = [], []
    for tile, is_sorted in tiles(sizes, kind):
        if time.monotonic() > deadline:
            break
        try:
            out = case.run(tile, is_sorted, 0).float()
            truth = truths[is_sorted]
            error = float((out - truth).norm() / truth.norm())
            if not error < 1e-2:
                failed.append(f"{tile}: off by {error}")
                continue
            us = graph_us(partial(case.run, tile, is_sorted), len(case.ids))
            found.append({"us": us, "is_sorted": is_sorted, **asdict(tile)})
        except Exception as error:  # the others are still worth it
            failed.append(f"{tile}: {type(error).__name__}: {str(error)[:120]}")
    found.sort(key=lambda row: row["us"])
    weight = case.product.weight
    floor = 1e6 * case.distinct() * weight[0].numel() * weight.element_size() / BANDWIDTH
    flops = 2.0 * sizes.tokens * sizes.top_k * weight[0].numel()
    return {"kind": kind, **asdict(sizes), "floor_us": floor, "flops": flops, "tiles": found, "failed": failed}


def options(row: dict[str, Any]) -> str:
    """A tile, briefly: rows/columns/depth/warps/stages and S(wapped), T(MA), P(ersistent), sorted or scanned."""
    sizes = "/".join(str(row[name]) for name in ("rows", "columns", "depth", "num_warps", "num_stages"))
    flags = (
        ("S" if row["swap"] else "") + ("T" if row["tma"] else "") + (f"P{row['programs']}" if row["programs"] else "")
    )
    return f"{sizes}{flags}{'' if row['is_sorted'] else ' scan'}"


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    if not row["tiles"]:
        return f"{row['kind']:8s} T={row['tokens']:5d} nothing ran: {row['failed'][:2]}"
    best = row["tiles"][0]["us"]
    rates = f"{100 * row['floor_us'] / best:4.0f} % of bandwidth {row['flops'] / best / 1e6:5.0f} TFLOP/s"
    tops = ", ".join(f"{options(tile)} {tile['us']:.1f}" for tile in row["tiles"][:5])
    bad = f"; {len(row['failed'])} failed: {row['failed'][0]}" if row["failed"] else ""
    return f"{row['kind']:8s} T={row['tokens']:5d} {best:8.1f} us {rates}: {tops}{bad}"


def main() -> None:
    """Compile beside each other, time one after another, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=[], choices=list(SHAPES))
    parser.add_argument("--sizes", type=int, nargs=4, metavar=("E", "K", "I", "C"))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--limit-s", type=float, default=600.0, help="tiles not tried by then are left out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    shapes = [SHAPES[name] for name in args.shape] + ([tuple(args.sizes)] if args.sizes else [])
    cases = [Sizes(*shape, tokens) for tokens in args.tokens for shape in shapes or [SHAPES["qwen3-30b-a3b"]]]
    jobs = [(case, kind, *tile) for case in cases for kind in (GATED, DOWN) for tile in tiles(case, kind)]
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = sum(pool.map(compile_some, [jobs[i :: 8 * args.jobs] for i in range(8 * args.jobs)]))
    print(
        f"{len(jobs)} kernels compiled, {failed} of them failed; {deadline - time.monotonic():.0f} s left", flush=True
    )
    table = []
    for case, kind in itertools.product(cases, (GATED, DOWN)):
        if time.monotonic() > deadline:
            break
        table.append(measure(case, kind, deadline))
        print(f"E{case.experts} {show(table[-1])}", flush=True)
        torch.cuda.empty_cache()
        if args.out is not None:
            args.out.write_text(json.dumps(table))


if __name__ == "__main__":
    main()
