"""Decode attention as ordinary steps launch it and as captured ones do (a list of splits), side by side on a GPU.

    python -m benchmarks.split_list [--programs 3 4 8] [--out results/split-list.json]

bf16, head size 128, blocks of 16 in random order. Each case is captured as one graph over several layers' caches, so
that the L2 cache is cold and the host does not count; us of a layer, and its bytes a second as a fraction of the
memory's. `--programs 3 4`: the list also with 3 and with 4 programs for each multiprocessor, not the usual number.
Where there is no GPU: `TRITON_INTERPRET=1 ... --cases 2x40 --dtype float32`, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.kernels.attention import AttentionMetadata, triton_splits
from app.kernels.attention.triton_ops import OPS
from benchmarks.offline import write
from benchmarks.roofline import BANDWIDTH

CASES = ["1x576", "8x576", "32x576", "128x576", "256x576", "64x4096", "1x32768", "256x100"]
HEADS = {"qwen3-0.6b": (16, 8), "llama-8b": (32, 8)}
DIM, BLOCK = 128, 16
COLD_BYTES = 200 << 20
USUAL_PROGRAMS = triton_splits._PROGRAMS_PER_SM


def metadata(batch: int, context: int, num_blocks: int, device: torch.device, *, is_static: bool) -> AttentionMetadata:
    """`batch` decodes of `context` tokens, each with blocks of its own."""
    per_request = -(-context // BLOCK)
    order = torch.randperm(num_blocks, device=device)[: batch * per_request].int().view(batch, per_request)
    table = torch.zeros(batch, max(per_request, 12288 // BLOCK), dtype=torch.int32, device=device)
    table[:, :per_request] = order
    return AttentionMetadata(
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=torch.full((batch,), -1, dtype=torch.int64, device=device),
        max_query_len=1,
        max_seq_len=table.shape[1] * BLOCK if is_static else context,
        num_decodes=batch,
        is_static=is_static,
    )


def timed(run: Callable[[], None], device: torch.device, repeats: int = 20) -> float:
    """Seconds of one run: from a graph on a GPU."""
    run()
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


def measure(
    heads: tuple[int, int], batch: int, context: int, dtype: torch.dtype, device: torch.device, programs: list[int]
) -> dict[str, Any]:
    """Both ways, and the list with other numbers of programs; `same_bits`: whether the results do not differ."""
    num_heads, num_kv_heads = heads
    num_blocks = batch * -(-context // BLOCK) + 1
    read = 2 * batch * context * num_kv_heads * DIM * dtype.itemsize
    layers = max(2, min(32, COLD_BYTES // read))
    shape = (num_blocks, 2, num_kv_heads, BLOCK, DIM)
    caches = [torch.randn(shape, dtype=dtype, device=device) for _ in range(layers)]
    query = torch.randn(batch, num_heads, DIM, dtype=dtype, device=device)
    row: dict[str, Any] = {}
    found = []
    ways = [("grid", USUAL_PROGRAMS), ("list", USUAL_PROGRAMS), *((f"list_{number}", number) for number in programs)]
    for name, number in ways:
        torch.manual_seed(0)
        triton_splits._PROGRAMS_PER_SM = number
        meta = metadata(batch, context, num_blocks, device, is_static=name != "grid")
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": DIM, "block_size": BLOCK}

        def run(meta: AttentionMetadata = meta, sizes: dict[str, int] = sizes) -> None:
            OPS.prepare(meta, **sizes)
            for cache in caches:
                OPS.paged_attention(query, cache, meta, scale=DIM**-0.5)

        OPS.prepare(meta, **sizes)
        found.append(OPS.paged_attention(query, caches[0], meta, scale=DIM**-0.5))
        seconds = timed(run, device) / layers
        row |= {f"{name}_us": 1e6 * seconds, f"{name}_fraction": read / seconds / BANDWIDTH}
    row["same_bits"] = all(torch.equal(found[0], other) for other in found[1:])
    return row


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--programs", nargs="*", type=int, default=[], help="for each multiprocessor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        for shape, heads in HEADS.items():
            for case in args.cases:
                batch, context = map(int, case.split("x"))
                try:
                    row = measure(heads, batch, context, getattr(torch, args.dtype), device, args.programs)
                except Exception as error:
                    row = {"error": f"{type(error).__name__}: {error}"}
                figures[f"{shape} {case}"] = row
                shown = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                print(f"{shape} {case}: {shown}", flush=True)
    write(args.out, figures)


if __name__ == "__main__":
    main()
