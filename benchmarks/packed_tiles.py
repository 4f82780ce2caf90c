"""Products of few rows with packed weights on a GPU: every tile of app/kernels/gemm/triton_packed.py and
gluon_packed.py, for the linear layers of Llama-8B; what the table of tiles was read off.

    python -m benchmarks.packed_tiles [--forms nibble e4m3 int8] [--rows 1 16 32 64] [--out results/packed_tiles.json]

Times are those inside a CUDA graph of dependent launches over so many copies of the weight that none is in a cache, as
in a decode step. The floor is the weight's bytes at 4.3 TB/s. Every form is checked in float64 first.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from app.kernels.gemm import DeferredNorm
from app.kernels.gemm.stored import Form, StoredTiles, bits_of, block_for
from app.kernels.gemm.triton_packed_ops import PackedTile, StreamedTile, packed_linear
from benchmarks.roofline import BANDWIDTH
from benchmarks.small_linear import graph_us

# name -> (rows of the weight, K, kind)
LAYERS = {
    "qkv": (6144, 4096, "late"), "o": (4096, 4096, "add"), "gate_up": (28672, 4096, "gated"),
    "down": (4096, 14336, "add"),
}  # fmt: skip
GROUPS = {"nibble": 128, "e2m1": 32, "table": 64, "int8": 1 << 30, "e4m3": 128}  # inputs of a scale
SPLITS = {"late": (1, 2, 4), "add": (2, 4, 8), "gated": (1, 2)}
ROWS_OF = {"late": 6144, "add": 4096, "gated": 28672}
COLD_BYTES = 200e6
SHARED_BYTES = 220 << 10
EPS = 1e-6


def stored(
    form: Form, columns: int, size: int, device: str = "cuda", *, is_zero_based: bool = False, block: int | None = None
) -> StoredTiles:
    """A random weight; e4m3 with a scale for 128 x 128."""
    group, scale_rows = GROUPS[form], 128 if form == "e4m3" else 1
    block = block or block_for(form, group)
    words = torch.randint(
        -(1 << 15), 1 << 15, (columns, -(-size // block) * block * bits_of(form) // 16), device=device
    )
    if form == "e4m3":
        words &= 0xBFBF - (1 << 16)  # no NaN
    num_groups = -(-(-(-size // block) * block) // group)
    scales = torch.rand(num_groups, -(-columns // scale_rows), device=device).bfloat16() / 64
    offsets = torch.randn_like(scales) / 64 if is_zero_based else None
    table = torch.linspace(-1, 1, 16, device=device).half() if form == "table" else None
    return StoredTiles(form, words.to(torch.int16), scales, offsets, table, size, block, group, scale_rows)


@dataclass(slots=True, frozen=True)
class Variant:
    """One way to launch a product."""

    tile: PackedTile | StreamedTile
    depth: int  # inputs of a block

    def __str__(self) -> str:
        tile = self.tile
        if isinstance(tile, StreamedTile):
            return "/".join(map(str, (tile.columns, tile.num_warps, tile.groups, tile.ahead, tile.height))) + "S"
        sizes = (tile.columns, self.depth, tile.num_warps, tile.num_stages, tile.splits, tile.height)
        return "/".join(map(str, sizes)) + "W" * tile.is_wide


def variants(form: Form, rows: int, kind: str) -> list[Variant]:
    """All that fit."""
    found = streamed_variants(rows) if rows <= 16 else []
    heights = (max(8, triton.next_power_of_2(rows)),) if rows <= 64 else (64, 128, 256)
    narrow = ((32, 2), (64, 2)) if rows <= 16 else ()
    widths = (*narrow, (64, 4), (128, 4), (128, 8)) if rows <= 64 else ((128, 8), (256, 8))
    depths = (128, 256) if form == "nibble" else (128,)
    for height, (columns, warps), depth, stages, splits in itertools.product(
        heights, widths, depths, (3, 4), SPLITS[kind] if rows <= 64 else (1,)
    ):
        num_bytes = (height * 2 + columns * bits_of(form) // 8) * depth * stages
        programs = -(-ROWS_OF[kind] // columns) * splits
        if num_bytes <= SHARED_BYTES and (rows > 64 or 100 <= programs <= 3000) and height * columns <= 256 * 128:
            for is_wide in (False,) if rows <= 64 else (False, True):
                found.append(Variant(PackedTile(columns, height, warps, stages, splits, is_wide), depth))
    return found


def streamed_variants(rows: int) -> list[Variant]:
    """Those of the kernel in Gluon."""
    shapes = ((16, 8, 8), (32, 8, 4), (32, 4, 2), (64, 8, 2), (64, 4, 1), (16, 4, 4))
    height = max(8, triton.next_power_of_2(rows))
    return [Variant(StreamedTile(*shape, height, ahead), 128) for shape in shapes for ahead in (2, 4)]


class Case:
    """Inputs of one kind of product."""

    def __init__(self, kind: str, x: torch.Tensor, weights: list[StoredTiles]) -> None:
        self.kind, self.x, self.weights = kind, x, weights
        squares = torch.zeros(len(x), 64, device=x.device)
        squares[:, 0] = x.float().square().sum(1)
        self.deferred = DeferredNorm(x, squares, EPS)
        columns = weights[0].shape[0]
        self.residual = torch.zeros(len(x), columns, dtype=x.dtype, device=x.device)
        self.norm = torch.ones_like(self.residual[0])


def product(case: Case, variant: Variant, i: int) -> torch.Tensor:
    """One launch."""
    weight, tile = case.weights[i], variant.tile
    if case.kind == "add":
        return packed_linear(case.x, weight, None, tile, residual=case.residual, norm=(case.norm, EPS))[0]
    activation = "silu" if case.kind == "gated" else None
    return packed_linear(case.deferred, weight, None, tile, activation=activation)[0]


def truth(case: Case) -> torch.Tensor:
    """The first weight's product in float64."""
    x = case.x if case.kind == "add" else case.deferred.materialize()
    out = x.double() @ case.weights[0].dequantize().double().t()
    if case.kind == "gated":
        gate, up = out.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up
    return out


def compile_one(job: tuple[Form, int, str, Variant]) -> None:
    """Leave a kernel in Triton's cache on disk."""
    form, rows, name, variant = job
    _, size, kind = LAYERS[name]
    x = torch.zeros(rows, size, dtype=torch.bfloat16, device="cuda")
    weight = stored(form, 4096, size, block=variant.depth)
    try:
        product(Case(kind, x, [weight]), variant, 0)
    except Exception as error:
        print(form, name, rows, variant, f"{type(error).__name__}: {str(error)[:200]}", flush=True)


def measure(form: Form, name: str, rows: int, tried: list[Variant]) -> list[tuple[float, Variant]]:
    """One layer and number of rows: microseconds, the best first."""
    columns, size, kind = LAYERS[name]
    copies = max(1, int(COLD_BYTES / (columns * size * bits_of(form) / 8)) + 1)
    found = []
    for depth in sorted({variant.depth for variant in tried}):
        weights = [stored(form, columns, size, block=depth) for _ in range(copies)]
        case = Case(kind, torch.randn(rows, size, dtype=torch.bfloat16, device="cuda"), weights)
        for variant in tried:
            if variant.depth != depth:
                continue
            try:
                found.append((graph_us(partial(product, case, variant), copies), variant))
            except Exception as error:  # the others are still worth it
                print(form, name, rows, variant, f"{type(error).__name__}: {str(error)[:200]}", flush=True)
        if found:
            best = min((pair for pair in found if pair[1].depth == depth), key=lambda pair: pair[0])[1]
            out, expected = product(case, best, 0), truth(case)
            error_of = float((out.double() - expected).norm() / expected.norm())
            if not error_of < 9e-3:
                print(f"WRONG {form} {name} {rows} {best} {error_of:.1e}", flush=True)
        torch.cuda.empty_cache()
    return sorted(found, key=lambda pair: pair[0])


def report(form: Form, name: str, rows: int, found: list[tuple[float, Variant]]) -> dict[str, Any]:
    """Print the best."""
    columns, size, _ = LAYERS[name]
    floor = 1e6 * columns * size * bits_of(form) / 8 / BANDWIDTH
    rate = 2e-6 * columns * size * rows / found[0][0]
    best = " ".join(f"{us:.1f}({variant})" for us, variant in found[:8])
    print(f"{form:6s} {name:8s} T={rows:3d} floor {floor:5.1f} {rate:4.0f} TF {best}", flush=True)
    rows_of = [{"us": us, "variant": str(variant)} for us, variant in found]
    return {"form": form, "layer": name, "rows": rows, "floor_us": floor, "found": rows_of}


def check(form: Form, rows: int, columns: int, size: int, dtype: torch.dtype, *, is_zero_based: bool) -> None:
    """Print what is wrong."""
    weight = stored(form, columns, size, is_zero_based=is_zero_based)
    tiles = {"late": StreamedTile(64, 4, 1), "add": StreamedTile(32, 8, 4), "gated": StreamedTile(32, 4, 2, ahead=2)}
    for kind, shape in (*tiles.items(), ("late", StreamedTile(16, 8, 8))):
        tile = replace(shape, height=32 if rows > 8 else 8)
        case = Case(kind, torch.randn(rows, size, device="cuda").to(dtype), [weight])
        out, expected = product(case, Variant(tile, 128), 0), truth(case)
        error = float((out.double() - expected).norm() / expected.norm())
        if not error < (6e-3 if dtype == torch.bfloat16 else 1e-3):
            print(f"WRONG {form} {kind} {rows} {columns} {size} {dtype} {is_zero_based}: {error:.1e}", flush=True)


def check_one(job: tuple[Form, int, int, int, torch.dtype, bool]) -> None:
    """`check`, and what it raises."""
    torch.manual_seed(0)
    try:
        check(*job[:-1], is_zero_based=job[-1])
    except Exception as error:  # the others are still worth it
        print("FAILED", *job, f"{type(error).__name__}: {str(error)[:300]}", flush=True)


def checks() -> list[Any]:
    """Odd sizes and even ones."""
    sizes = ((3, 4096, 4096), (17, 200, 1000))
    dtypes = (torch.bfloat16, torch.float16)
    return [
        (form, *size, dtype, is_zero_based)
        for size, form, dtype, is_zero_based in itertools.product(sizes, GROUPS, dtypes, (False, True))
        if is_zero_based <= (form == "nibble") and (dtype == torch.bfloat16 or size == sizes[1])
    ]


def compiled(jobs: list[Any], num_processes: int) -> None:
    """Check and compile beside each other."""
    began = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        checked = pool.map(check_one, checks())
        list(pool.map(compile_one, jobs))
        print(f"{len(list(checked))} checks", flush=True)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    """Check, compile beside each other, time one after another, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=["nibble", "e4m3", "int8"])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    cases = list(itertools.product(args.rows, args.forms, args.layers))
    if args.jobs:
        jobs = [(form, rows, name) for rows, form, name in cases]
        compiled([(*job, tile) for job in jobs for tile in variants(*job[:2], LAYERS[job[2]][2])], args.jobs)
    if args.compile_only:
        return
    table = []
    for rows, form, name in cases:
        if time.monotonic() > began + args.limit_s:
            print("out of time", flush=True)
            break
        found = measure(form, name, rows, variants(form, rows, LAYERS[name][2]))
        table.append(report(form, name, rows, found))
        if args.out is not None:
            args.out.write_text(json.dumps(table))


if __name__ == "__main__":
    main()
