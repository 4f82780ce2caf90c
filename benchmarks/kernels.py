"""Every kernel on one GPU: checked against float64, then timed beside its limit (benchmarks/kernel_timings.py).

    python -m benchmarks.kernels --out kernels.json            (on a GPU; exits 1 if a check fails)
    python -m benchmarks.kernels --quick --out kernels.json    (no checks; timings for at most 45 s)
    TRITON_INTERPRET=1 python -m benchmarks.kernels --quick    (on a CPU: a few checks, no timings)
    python -m benchmarks.kernels --only sample                 (no checks; timings whose name holds the word)

Decode is bound by reading keys and values: the table gives GB/s and the fraction of 4.3 TB/s, what a copy reaches on
an H200. Prefill is bound by arithmetic: the table gives TFLOP/s beside torch's own attention on contiguous tensors.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton.testing

from app.kernels.attention import KV_FP8, triton_decode, triton_prefill, triton_splits
from app.kernels.attention.reference import write_kv
from app.kernels.attention.triton_decode import DecodeTile
from app.kernels.attention.triton_ops import OPS, TritonPlan
from app.kernels.attention.triton_prefill import PrefillTile
from app.kernels.sampling import GUMBEL_ARGMAX, reference, uniform
from benchmarks.kernel_timings import HEAD_DIM, Row, decode_row, graph_ms, large_batch, prepare, scales_for, timings
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

QUICK_BUDGET_S = 45.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {"bf16": 8e-3, "fp16": 1e-3, "fp32": 2e-6}  # bounds of norm(out - truth) / norm(truth)
SWEPT = ("decode", "decode-fp8", "prefill", "prefill-fp8")  # fp8: of the KV cache
SWEPT_DECODES = [(1, 1, 576), (8, 1, 576), (32, 1, 576), (256, 1, 1024), (64, 1, 4096), (1, 1, 32768)]
MIXED = [(1, 1), (1, 2500), (1, 257), (1, 1024), (1, 16), (300, 300), (129, 900), (1, 9), (64, 1100)]
MIXED_QUICK = [(1, 1), (1, 40), (5, 5), (19, 40)]


@dataclass(frozen=True)
class Case:
    """One check: a mixed batch of this shape."""

    dtype: str
    head_dim: int
    group: int
    block_size: int
    sliding_window: int | None
    soft_cap: float | None
    lens: tuple[tuple[int, int], ...]


def check_cases(quick: bool) -> list[Case]:
    """Every dtype with every head size, five times, while groups, block sizes and options turn at their own pace."""
    options: list[tuple[int | None, float | None]] = [(None, None), (200, None), (None, 20.0), (150, 10.0)]
    turning = zip(
        itertools.cycle([1, 2, 4, 7, 8]), itertools.cycle([16, 32, 64]), itertools.cycle(options), strict=False
    )
    names = ["fp16", "fp32"] if quick else list(DTYPES)
    shapes = itertools.product(range(1 if quick else 5), names, [64, 80, 128, 256])
    return [
        Case(name, head_dim, group, block_size, *option, tuple(MIXED_QUICK if quick else MIXED))
        for (_, name, head_dim), (group, block_size, option) in zip(shapes, turning, strict=False)
    ]


def attend(batch: Batch, **options: Any) -> torch.Tensor:
    """One layer of one step, plan included."""
    prepare(batch)
    return OPS.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=batch.query.shape[2] ** -0.5, **options)


def run_check(case: Case, device: str) -> dict[str, Any]:
    """Error of the Triton path against float64 attention over contiguous tensors, and of write_kv against torch."""
    options: dict[str, Any] = {"sliding_window": case.sliding_window, "soft_cap": case.soft_cap}
    batch = make_batch(
        list(case.lens),
        num_heads=2 * case.group,
        num_kv_heads=2,
        head_dim=case.head_dim,
        block_size=case.block_size,
        dtype=DTYPES[case.dtype],
        device=device,
    )
    truth = contiguous_attention(batch, scale=case.head_dim**-0.5, **options)
    out = attend(batch, **options).double()
    error = float((out - truth).norm() / truth.norm())
    key, value = torch.randn_like(batch.query[:, :2]), torch.randn_like(batch.query[:, :2])
    written, expected = torch.zeros_like(batch.kv_cache), torch.zeros_like(batch.kv_cache)
    OPS.write_kv(key, value, written, batch.meta.slot_mapping)
    write_kv(key, value, expected, batch.meta.slot_mapping)
    passed = error < TOLERANCE[case.dtype] and torch.equal(written, expected)
    return {**asdict(case), "relative_error": error, "max_error": float((out - truth).abs().max()), "passed": passed}


def check_invariance(device: str, quick: bool) -> dict[str, Any]:
    """A decode gives the same bits alone and in a batch (I6); random numbers are the same bits on CPU and GPU."""
    lens = [(1, 20), (1, 300)] if quick else [(1, 20), (1, 300), (1, 900), (1, 3000), (1, 5000)]
    dtype = torch.float16 if quick else torch.bfloat16
    batch = make_batch(lens, num_heads=8, num_kv_heads=2, head_dim=64, dtype=dtype, device=device)
    together = attend(batch)
    same = True
    for request, (_, seq_len) in enumerate(lens):
        meta = replace(
            batch.meta,
            query_start_loc=batch.meta.query_start_loc[:2],
            seq_lens=batch.meta.seq_lens[request : request + 1],
            block_table=batch.meta.block_table[request : request + 1],
            max_seq_len=seq_len,
            num_decodes=1,
        )
        alone = attend(replace(batch, query=batch.query[request : request + 1], meta=meta))
        same &= torch.equal(alone[0], together[request])
    keys, positions = torch.randint(-(2**62), 2**62, (8, 2)), torch.arange(8)
    bits = torch.equal(uniform(keys, positions, 1000, 0), uniform(keys.to(device), positions.to(device), 1000, 0).cpu())
    logits = torch.randn(8, 5000 if quick else 150_000, device=device) * 2
    arguments = (logits, keys.to(device), positions.to(device))
    draw = GUMBEL_ARGMAX.on(torch.device(device))
    draws = torch.equal(draw(*arguments), reference.gumbel_argmax(*arguments))
    return {
        "decode_batch_invariant": same,
        "uniform_same_bits": bits,
        "same_draws": draws,
        "passed": same and bits and draws,
    }


def sweep(jobs: int, what: list[str]) -> list[dict[str, Any]]:
    """Every tile on some shapes for each kernel: what the tables in choose_tile were read off."""
    decode_tiles = [DecodeTile(*sizes) for sizes in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4))]
    prefill_tiles = [PrefillTile(*sizes) for sizes in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4))]
    tiles: dict[str, Any] = {"decode": decode_tiles, "prefill": prefill_tiles}
    work = [(kind, block, tile) for kind in what for block in (16, 64) for tile in tiles[kind.split("-")[0]]]
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_tile, work, chunksize=2))
    rows = []
    for kind, block in itertools.product(what, (16, 64)):
        is_decode = kind.startswith("decode")
        for shape in SWEPT_DECODES if is_decode else [(1, 8192, 8192)]:
            batch = _sweep_batch(kind, shape, block)
            name = f"{kind} {shape[0]} x {shape[2]}, block {block}"
            rows += [_sweep_row(batch, name, tile) for tile in (decode_tiles if is_decode else prefill_tiles)]
    rows.sort(key=lambda row: (row["what"], row["ms"]))
    return [row for row in rows if row["ms"] < 1.25 * min(r["ms"] for r in rows if r["what"] == row["what"])]


def sweep_splits() -> list[dict[str, Any]]:
    """How finely decode cuts a context: short splits fill the GPU at small batches, long ones merge less."""
    rows = []
    for shape in ((1, 2048), (1, 32768), (8, 8192), (64, 4096), (256, 1024)):
        for max_splits, split_keys in itertools.product((32, 64, 128), (128, 256, 512)):
            with mock.patch.multiple(triton_splits, MAX_SPLITS=max_splits, SPLIT_KEYS=split_keys):
                row = decode_row(*shape, 16)
            rows.append({**row, "max_splits": max_splits, "split_keys": split_keys})
    return rows


def _compile_tile(job: tuple[str, int, DecodeTile | PrefillTile]) -> None:
    """Leave one tile's kernel in Triton's cache on disk."""
    what, block, tile = job
    _sweep_row(_sweep_batch(what, (1, 1 if what.startswith("decode") else 128, 1024), block), what, tile)


def _sweep_batch(kind: str, shape: tuple[int, int, int], block: int) -> Batch:
    kv_dtype = KV_FP8 if kind.endswith("fp8") else torch.bfloat16
    return large_batch(*shape, block, is_static=kind.startswith("decode"), kv_dtype=kv_dtype)


def _sweep_row(batch: Batch, what: str, tile: DecodeTile | PrefillTile) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "sliding_window": None, "soft_cap": None, "tile": tile}
    options["kv_scales"] = scales_for(batch.kv_cache.dtype)
    out = torch.empty_like(batch.query)
    if isinstance(tile, DecodeTile):
        assert isinstance(batch.meta.plan, TritonPlan)
        scratch = batch.meta.plan.scratch
        call = partial(triton_decode.decode, batch.query, batch.kv_cache, batch.meta, scratch, out, **options)
    else:
        call = partial(triton_prefill.prefill, batch.query, batch.kv_cache, batch.meta, out, **options)
    try:
        if batch.meta.is_static:  # a small batch is over before the host has launched the next
            ms = graph_ms(call)
        else:
            ms = float(triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median"))
    except triton.runtime.errors.OutOfResources:
        ms = float("inf")
    return {"what": what, "ms": ms, **asdict(tile)}


def run_checks(device: str, quick: bool, jobs: int) -> list[dict[str, Any]]:
    """All checks, in `jobs` processes."""
    cases = check_cases(quick)
    if jobs == 1:
        return [run_check(case, device) for case in cases]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(run_check, cases, itertools.repeat(device)))


def show(row: Row) -> None:
    """One line of the report."""
    cells = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name != "what"
    ]
    print(f"{row['what']:64s}", "  ".join(cells), flush=True)


def checks(device: str, quick: bool, jobs: int) -> dict[str, Any]:
    """Run, print and return all checks."""
    started = time.perf_counter()
    rows = run_checks(device, quick, jobs)
    invariance = check_invariance(device, quick)
    failed = [row for row in [*rows, invariance] if not row["passed"]]
    for name in DTYPES:
        errors = [row["relative_error"] for row in rows if row["dtype"] == name]
        print(f"checks {name}: {len(errors)}, largest relative error {max(errors, default=0.0):.2e}")
    print(f"invariance {invariance}; {len(failed)} failed; {time.perf_counter() - started:.0f} s", flush=True)
    for row in failed:
        print("FAILED", row)
    return {"checks": rows, "invariance": invariance, "num_failed": len(failed)}


def main() -> int:
    """Return 1 if a check failed or a timing could not be taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    parser.add_argument(
        "--quick", action="store_true", help="on a GPU only timings, within a time limit; else few checks"
    )
    parser.add_argument("--only", help="no checks; only timings whose name holds this word")
    parser.add_argument("--sweep", nargs="+", choices=[*SWEPT, "splits"], default=[], help="every tile")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the checks (compiling takes longest)")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {"torch": torch.__version__, "num_failed": 0}
    on_gpu = device == "cuda"
    if not (on_gpu and (arguments.only is not None or arguments.quick)):
        result |= checks(device, arguments.quick, arguments.jobs)
    if on_gpu:
        result["device"] = torch.cuda.get_device_name()
        budget_s = QUICK_BUDGET_S if arguments.quick else float("inf")
        result["timings"] = []
        for row in timings(arguments.only or "", budget_s):
            show(row)
            result["timings"].append(row)
            result["num_failed"] += "error" in row
        if arguments.sweep:
            result["sweep"] = sweep(arguments.jobs, [kind for kind in arguments.sweep if kind != "splits"])
            result["sweep_splits"] = sweep_splits() if "splits" in arguments.sweep else []
            for row in result["sweep"] + result["sweep_splits"]:
                show(row)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1))
    return 1 if result["num_failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
