"""Latent attention on a GPU, DeepSeek's sizes in bf16: each kernel compared with PyTorch's result, then timed.

    python -m benchmarks.mla [--out results/mla.json] [--heads 16 128]

Decode steps meet latents as they lie in the cache, the joining of parts included: GB/s are those of the latents, whose
floor is a copy's 4.3 TB/s. Several layers with caches of their own run one after another in one CUDA graph, so that no
latent is in a cache of the GPU. Prefills expand the latents: gathering, their product and attention; TFLOP/s count the
attention alone, in the time of all. Beside both stands PyTorch's attention over keys and values that are expanded
already, where they fit. Times in us.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from app.kernels.attention import KV_FP8, AttentionMetadata
from app.kernels.mla import chunk_tokens, reference
from app.kernels.mla.triton_ops import OPS

LATENT, ROPE, NOPE, VALUE, BLOCK = 512, 64, 128, 128, 16
SCALE = (NOPE + ROPE) ** -0.5
CACHE_BYTES = 300 << 20  # of the layers of a graph: several times what a GPU keeps
SDPA_BYTES = 8 << 30  # of expanded keys and values, at most
TOLERANCE = 2e-2
DECODES = [(1, 1024), (1, 16384), (8, 1024), (32, 1024), (32, 8192), (128, 4096), (256, 1024)]
PREFILLS = [(1, 2048, 2048), (1, 8192, 8192), (4, 2048, 2048), (1, 2048, 32768)]
Row = dict[str, Any]


def metadata(counts: list[int], lens: list[int]) -> AttentionMetadata:
    """Requests that bring `counts` tokens each, with blocks in a scrambled order; block 0 is nobody's."""
    blocks_of = [-(-length // BLOCK) for length in lens]
    table = torch.zeros(len(lens), max(blocks_of), dtype=torch.int32)
    blocks = torch.randperm(sum(blocks_of)).int() + 1
    for row, mine in zip(table, blocks.split(blocks_of), strict=True):
        row[: len(mine)] = mine
    starts = F.pad(torch.tensor(counts).cumsum(0), (1, 0)).int()
    return AttentionMetadata(
        starts.cuda(), torch.tensor(lens).int().cuda(), table.cuda(), torch.zeros(0), max(counts), max(lens),
        sum(count == 1 for count in counts), host_lens=np.array(lens),
    )  # fmt: skip


def latents(lens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A cache for so many requests."""
    blocks = sum(-(-length // BLOCK) for length in lens) + 1
    return torch.randn(blocks, BLOCK, LATENT + ROPE, dtype=torch.bfloat16, device="cuda").to(dtype)


def timed(run: Callable[[], object]) -> float:
    """Median of some runs, us."""
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return 1e3 * median(first.elapsed_time(then) for first, then in pairwise(events))


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """A graph of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def difference(found: torch.Tensor, truth: torch.Tensor) -> Row:
    """How far it is from the truth, and whether that is too far."""
    error = float((found.double() - truth.double()).norm() / truth.double().norm())
    return {"difference": error} | ({} if error < TOLERANCE else {"error": "differs from PyTorch's"})


def decode_row(heads: int, batch: int, context: int, kv_dtype: torch.dtype) -> Row:
    """One token of each request."""
    lens = [context] * batch
    meta, num_bytes = metadata([1] * batch, lens), batch * context * (LATENT + ROPE) * kv_dtype.itemsize
    caches = [latents(lens, kv_dtype) for _ in range(max(1, min(27, CACHE_BYTES // num_bytes)))]
    query = torch.randn(batch, heads, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
    more: Row = {"scale": SCALE, "latent_size": LATENT}
    if kv_dtype == KV_FP8:
        more["kv_scale"] = torch.ones(1, device="cuda")
    reference.prepare(meta, num_heads=heads, block_size=BLOCK)
    truth = reference.attend(query, caches[0], meta, **more)
    OPS.prepare(meta, num_heads=heads, block_size=BLOCK)
    row = difference(OPS.attend(query, caches[0], meta, **more), truth)
    us = timed(captured(lambda: [OPS.attend(query, cache, meta, **more) for cache in caches])) / len(caches)
    flops = 2.0 * batch * context * heads * (2 * LATENT + ROPE)
    row |= {"us": us, "GB/s": num_bytes / us / 1e3, "TFLOP/s": flops / us / 1e6}
    return row | sdpa_row(heads, batch, 1, context)


def prefill_row(heads: int, batch: int, count: int, context: int) -> Row:
    """The last `count` tokens of each request, as an eager step launches them."""
    lens = [context] * batch
    meta, cache = metadata([count] * batch, lens), latents(lens, torch.bfloat16)
    query = torch.randn(batch * count, heads, NOPE + ROPE, dtype=torch.bfloat16, device="cuda")
    up = torch.randn(heads, NOPE + VALUE, LATENT, dtype=torch.bfloat16, device="cuda") * LATENT**-0.5
    size = chunk_tokens(heads, NOPE + VALUE, 2, 1 << 20), heads, NOPE + VALUE
    arguments = query, cache, meta, up, torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    more: Row = {"scale": SCALE, "value_dim": VALUE}
    reference.prepare(meta, num_heads=heads, block_size=BLOCK)
    truth = reference.attend_expanded(*arguments, **more)
    OPS.prepare(meta, num_heads=heads, block_size=BLOCK)
    row = difference(OPS.attend_expanded(*arguments, **more), truth)
    us = timed(lambda: OPS.attend_expanded(*arguments, **more))
    flops = 2.0 * batch * heads * (NOPE + ROPE + VALUE) * (count * (context - count) + count * count / 2)
    return row | {"us": us, "TFLOP/s": flops / us / 1e6} | sdpa_row(heads, batch, count, context)


def sdpa_row(heads: int, batch: int, count: int, context: int) -> Row:
    """PyTorch's attention over whole heads: of one token to all positions, or causal."""
    if 2 * batch * context * heads * (NOPE + ROPE + VALUE) > SDPA_BYTES or count not in (1, context):
        return {}
    sizes = ((count, NOPE + ROPE), (context, NOPE + ROPE), (context, VALUE))
    query, key, value = (torch.randn(batch, heads, *size, dtype=torch.bfloat16, device="cuda") for size in sizes)
    run = partial(F.scaled_dot_product_attention, query, key, value, is_causal=count > 1, scale=SCALE)
    return {"sdpa us": timed(run)}


def entries(heads: list[int]) -> list[tuple[str, Callable[[], Row]]]:
    """What is timed, by name."""
    found: list[tuple[str, Callable[[], Row]]] = []
    for num in heads:
        for dtype, name in ((torch.bfloat16, "decode"), (KV_FP8, "decode fp8")):
            for batch, context in DECODES:
                found.append(
                    (f"{name} {num} heads, {batch} x {context}", partial(decode_row, num, batch, context, dtype))
                )
        for batch, count, context in PREFILLS:
            what = f"prefill {num} heads, {batch} x {count} of {context}"
            found.append((what, partial(prefill_row, num, batch, count, context)))
    return found


def main() -> int:
    """1 if a result differs or a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for what, run in entries(arguments.heads):
        try:
            row = {"what": what, **run()}
        except Exception as error:  # whatever a compiler or a driver may throw: the others are still worth it
            traceback.print_exc(limit=-3)
            row = {"what": what, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        torch.cuda.empty_cache()
        rows.append(row)
        figures = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
        print(", ".join(f"{key} {value}" if key != "what" else f"{value:34s}" for key, value in figures.items()))
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(rows, indent=1))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
