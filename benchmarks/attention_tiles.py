"""Every tile of the attention kernels for one size of heads on a GPU, bf16; what their tables of tiles are read off.

    python -m benchmarks.attention_tiles --head-dim 256 --heads 8 --kv-heads 4 [--jobs 14] [--out results/tiles.json]

Decodes are timed in CUDA graphs over enough layers' caches that none lies in the L2 cache, prefills one by one. The
floor of a decode is the bytes of its keys and values at 4.3 TB/s; TFLOP/s of a prefill count what the mask leaves.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from app.kernels.attention import AttentionMetadata, AttentionOptions, triton_decode, triton_prefill
from app.kernels.attention.triton_decode import DecodeTile
from app.kernels.attention.triton_ops import OPS
from app.kernels.attention.triton_prefill import PrefillTile
from benchmarks.offline import write
from benchmarks.roofline import BANDWIDTH

BLOCK_SIZE = 16
COLD_BYTES = 200e6


@dataclass(frozen=True)
class Heads:
    """The shape of the layer."""

    head_dim: int
    heads: int
    kv_heads: int

    def options(self, window: int | None) -> AttentionOptions:
        """What the kernels are told."""
        return AttentionOptions(self.head_dim**-0.5, window)


@dataclass(frozen=True)
class Load:
    """A batch of equal requests: a prefill if they bring more than a token each."""

    requests: int
    num_query: int
    context: int
    window: int | None = None

    def __str__(self) -> str:
        kind = "decode" if self.num_query == 1 else "prefill"
        return f"{kind} {self.requests} x {self.context}{f', window {self.window}' if self.window else ''}"


LOADS = [
    *(Load(requests, 1, 576) for requests in (1, 32, 256)),
    Load(1, 1, 8192), Load(32, 1, 4096), Load(32, 1, 4096, 1024),
    Load(1, 8192, 8192), Load(1, 8192, 8192, 1024),
]  # fmt: skip


def decode_tiles() -> list[DecodeTile]:
    """Those to be tried."""
    return [DecodeTile(*sizes) for sizes in itertools.product((16, 32, 64), (2, 4, 8), (2, 3, 4))]


def prefill_tiles() -> list[PrefillTile]:
    """Those to be tried."""
    return [PrefillTile(*sizes) for sizes in itertools.product((64, 128), (32, 64), (4, 8), (1, 2, 3))]


def inputs(heads: Heads, load: Load, layers: int) -> tuple[torch.Tensor, list[torch.Tensor], AttentionMetadata]:
    """Queries, caches of so many layers, and a planned step; blocks in random order."""
    blocks = triton.cdiv(load.context, BLOCK_SIZE)
    table = torch.randperm(load.requests * blocks, device="cuda").int().view(load.requests, blocks)
    shape = (load.requests * blocks, 2, heads.kv_heads, BLOCK_SIZE, heads.head_dim)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    is_decode = load.num_query == 1
    meta = AttentionMetadata(
        query_start_loc=torch.arange(load.requests + 1, dtype=torch.int32, device="cuda") * load.num_query,
        seq_lens=torch.full((load.requests,), load.context, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=torch.arange(load.requests * load.num_query, device="cuda"),
        max_query_len=load.num_query,
        max_seq_len=12288 if is_decode else load.context,
        num_decodes=load.requests if is_decode else 0,
        is_static=is_decode,
    )
    OPS.prepare(meta, num_heads=heads.heads, num_kv_heads=heads.kv_heads, head_dim=heads.head_dim, block_size=16)
    query = torch.randn(
        load.requests * load.num_query, heads.heads, heads.head_dim, dtype=torch.bfloat16, device="cuda"
    )
    return query, caches, meta


def candidates(heads: Heads, load: Load) -> Iterator[tuple[DecodeTile | PrefillTile, int, Callable[[int], object]]]:
    """(tile, number of layers, call with a layer's number) of each tile, the present one first."""
    bytes_of_layer = 4 * load.requests * load.context * heads.kv_heads * heads.head_dim
    layers = 1 if load.num_query > 1 else max(2, int(COLD_BYTES / bytes_of_layer) + 1)
    query, caches, meta = inputs(heads, load, layers)
    out, options = torch.empty_like(query), heads.options(load.window)

    def decode(tile: DecodeTile, i: int) -> None:
        triton_decode.decode(query, caches[i], meta, meta.plan.scratch, out, options, tile)

    def prefill(tile: PrefillTile, i: int) -> None:
        triton_prefill.prefill(query, caches[i], meta, out, options, tile)

    if load.num_query == 1:
        present = triton_decode.choose_tile(heads.head_dim, query.dtype)
        for tile in dict.fromkeys([present, *decode_tiles()]):
            yield tile, layers, partial(decode, tile)
    else:
        first = triton_prefill.choose_tile(heads.head_dim, query.dtype)
        for one in dict.fromkeys([first, *prefill_tiles()]):
            yield one, layers, partial(prefill, one)


def compile_one(job: tuple[Heads, Load, int]) -> None:
    """Leave a kernel in Triton's cache on disk."""
    heads, load, number = job
    small = Load(1, min(load.num_query, 64), load.context if load.num_query == 1 else 64, load.window)
    one = next(itertools.islice(candidates(heads, small), number, None), None)
    try:
        if one is not None:  # the present tile may be among those to be tried
            one[2](0)
    except triton.runtime.errors.OutOfResources:
        return


def time_us(call: Callable[[int], object], layers: int, *, in_graph: bool) -> float:
    """Microseconds of one call."""
    call(0)
    runs: Callable[[], None] = partial(call, 0)
    repeats = 1
    if in_graph:
        repeats = max(16, layers)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which makes what the calls read
        with torch.cuda.stream(stream):
            call(0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(repeats):
                    call(i % layers)
        runs = graph.replay
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        runs()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * median(times) / repeats


def measure(heads: Heads, load: Load) -> dict[str, Any]:
    """The present tile and the best ones."""
    found: list[tuple[float, DecodeTile | PrefillTile]] = []
    for tile, layers, call in candidates(heads, load):
        try:
            found.append((time_us(call, layers, in_graph=load.num_query == 1), tile))
        except triton.runtime.errors.OutOfResources:
            continue
    present, ranked = found[0], sorted(found, key=lambda pair: pair[0])
    keys = min(load.context, load.window or load.context)
    row: dict[str, Any] = {"load": str(load), "present_us": present[0], "best": []}
    row["best"] = [{"us": us, **asdict(tile)} for us, tile in ranked[:6]]
    if load.num_query == 1:
        row["floor_us"] = 1e6 * 4 * load.requests * keys * heads.kv_heads * heads.head_dim / BANDWIDTH
    else:
        pairs = load.num_query * keys - keys * (keys - 1) / 2
        row["tflops"] = 4 * pairs * heads.heads * heads.head_dim / ranked[0][0] / 1e6
    return row


def main() -> None:
    """Compile beside each other, time one after another, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    heads = Heads(args.head_dim, args.heads, args.kv_heads)
    kinds = [LOADS[0], next(load for load in LOADS if load.num_query == 1 and load.window), *LOADS[-2:]]
    jobs = [
        (heads, load, number)
        for load in kinds
        for number in range(1 + len(decode_tiles() if load.num_query == 1 else prefill_tiles()))
    ]
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs, chunksize=2))
    table = []
    for load in LOADS:
        row = measure(heads, load)
        table.append(row)
        bound = f"floor {row['floor_us']:8.2f}" if "floor_us" in row else f"TFLOP/s {row['tflops']:5.0f}"
        best = "  ".join(
            "/".join(f"{value}" for value in list(one.values())[1:5]) + f" {one['us']:.2f}" for one in row["best"][:4]
        )
        print(f"{row['load']:28s} {bound} present {row['present_us']:8.2f} us; {best}", flush=True)
        torch.cuda.empty_cache()
    write(args.out, {"heads": asdict(heads), "rows": table})


if __name__ == "__main__":
    main()
