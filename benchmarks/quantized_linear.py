"""Products with quantized weights on a GPU beside cuBLAS in bf16, for the linear layers of Llama-8B.

    python -m benchmarks.quantized_linear [--rows 1 32 256 8192] [--kinds w4 fp8] [--out results/quantized.json]

Each is the product that a decoder layer runs, with what follows it: rows with a deferred norm, gate and up with their
activation, the sum with the residual and its norm. Times are those inside a CUDA graph over so many copies of the
weight that none is in a cache. A table of microseconds by layer, and the milliseconds of the 32 layers; GB/s of the
weight's bytes (floor 4,300) and TFLOP/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app.kernels.gemm import LINEAR_OPS, Activations, DeferredNorm, Inputs, LinearOps, materialize
from app.kernels.gemm.fp8 import Fp8Weight
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.lookup import TableWeight
from app.kernels.gemm.stored import E2M1
from app.kernels.gemm.tiled import TiledWeight
from app.quantization.rounding import to_fp8_blocks, to_int8_rows
from benchmarks.packed_tiles import LAYERS
from benchmarks.small_linear import graph_us

NUM_LAYERS = 32
COLD_BYTES = 200e6
EPS = 1e-6


def random_codes(columns: int, size: int, bits: int) -> torch.Tensor:
    """uint8 [columns, size] on the GPU."""
    return torch.randint(1 << bits, (columns, size), dtype=torch.uint8, device="cuda")


def grouped(columns: int, size: int, *, is_zero_based: bool = False) -> TiledWeight:
    """4 bits in groups of 128."""
    scale = torch.rand(columns, size // 128, device="cuda").half() / 64
    offset = -7.3 * scale if is_zero_based else None
    return GroupWeight.of(random_codes(columns, size, 4), scale, offset, 4, None, torch.bfloat16)


def tabled(columns: int, size: int, group: int, table: torch.Tensor) -> TiledWeight:
    """4 bits of a table."""
    scale = torch.rand(columns, size // group, device="cuda") / 16
    return TableWeight.of(random_codes(columns, size, 4), table.cuda(), scale, torch.bfloat16)


def plain(columns: int, size: int) -> torch.Tensor:
    """Numbers in bf16."""
    return torch.randn(columns, size, device="cuda", dtype=torch.bfloat16) / 64


KINDS: dict[str, Callable[[int, int], Any]] = {
    "bf16": plain,
    "w4": grouped,
    "w4 zeros": partial(grouped, is_zero_based=True),
    "mxfp4": lambda columns, size: tabled(columns, size, 32, E2M1),
    "nf4": lambda columns, size: tabled(columns, size, 64, torch.linspace(-1, 1, 16)),
    "fp8": lambda columns, size: Fp8Weight.quantize(plain(columns, size)),
    "fp8 block": lambda columns, size: to_fp8_blocks(plain(columns, size), (128, 128)).pack(),
    "int8": lambda columns, size: to_int8_rows(plain(columns, size)).pack(),
}


@dataclass(slots=True, frozen=True)
class Case:
    """Inputs of a layer's product."""

    kind: str  # of LAYERS
    x: torch.Tensor
    squares: torch.Tensor
    residual: torch.Tensor

    @classmethod
    def of(cls, kind: str, rows: int, columns: int, size: int) -> Case:
        """Random inputs."""
        x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
        squares = x.float().square().unflatten(1, (64, -1)).sum(2)
        return cls(kind, x, squares, torch.zeros(rows, columns, device="cuda", dtype=x.dtype))

    def product(self, weight: Any) -> Inputs:
        """The product with what follows it; rows of a deferred norm as long as they are few."""
        device = self.x.device
        ops: LinearOps[Any] = LINEAR_OPS.on(device) if isinstance(weight, torch.Tensor) else weight.ops_on(device)
        if self.kind == "add":
            return ops.linear_add_norm(self.x, weight, None, self.residual, self.residual[0], EPS, True)[1]
        x: Activations = DeferredNorm(self.x, self.squares, EPS) if len(self.x) <= 64 else self.x
        return ops.gated_linear(x, weight, None, "silu") if self.kind == "gated" else ops.linear(x, weight, None)

    def truth(self, weight: torch.Tensor) -> torch.Tensor:
        """The same of plain numbers, in fp32."""
        rows = DeferredNorm(self.x, self.squares, EPS).materialize() if len(self.x) <= 64 else self.x
        out = (self.x if self.kind == "add" else rows).float() @ weight.float().t()
        if self.kind == "gated":
            gate, up = out.chunk(2, dim=1)
            return torch.nn.functional.silu(gate) * up
        return out


def measure(kind: str, name: str, rows: int) -> dict[str, Any]:
    """One kind of weight, layer and number of rows."""
    columns, size, follows = LAYERS[name]
    case, first = Case.of(follows, rows, columns, size), KINDS[kind](columns, size)
    num_bytes = 2.0 * columns * size if isinstance(first, torch.Tensor) else first.stored.words.numel() * 2.0
    copies = max(1, int(COLD_BYTES / num_bytes) + 1)
    weights = [first] + [KINDS[kind](columns, size) for _ in range(copies - 1)]
    torch.cuda.empty_cache()
    us = graph_us(lambda i: case.product(weights[i]), copies)
    expected = case.truth(first if isinstance(first, torch.Tensor) else first.dequantize())
    error = float((materialize(case.product(first)).float() - expected).norm() / expected.norm())
    return {
        "kind": kind, "layer": name, "rows": rows, "us": us, "gb_per_s": num_bytes / us / 1e3,
        "tflop_per_s": 2e-6 * rows * columns * size / us, "error": error,
    }  # fmt: skip


def main() -> None:
    """Print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 256, 1024, 8192])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    torch.set_float32_matmul_precision("highest")
    for rows, kind in itertools.product(args.rows, args.kinds):
        line, total = "", 0.0
        for name in LAYERS:
            try:
                row = measure(kind, name, rows)
            except Exception as error:  # the others are still worth it
                line, total = f"{line}  {name} {type(error).__name__}: {str(error)[:120]}", float("nan")
                continue
            table.append(row)
            total += row["us"]
            rates = f"{row['gb_per_s']:4.0f} GB/s {row['tflop_per_s']:4.0f} TF {row['error']:.0e}"
            line = f"{line}  {name} {row['us']:.1f} us ({rates})"
        print(f"{rows:5d} {kind:9s} {total * NUM_LAYERS / 1e3:7.2f} ms{line}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
