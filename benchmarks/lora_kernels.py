"""A decoder layer's products with low-rank adapters over those without, on a GPU: checked, then timed.

    python -m benchmarks.lora_kernels [--shape llama-8b] [--out results/lora_kernels.json]

The four products of some layers run one behind the other in a CUDA graph, as in a decode step, each with weights of
its own, so that none is in a cache; attention is left out. Prefills run without a graph's help to the host, in one too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app.kernels.fused.reference import act_and_mul, rms_norm
from app.kernels.gemm import DeferredNorm, LinearOps, materialize, triton_small
from app.kernels.lora import NO_SLOT, TILE_RANK, AdaptedWeight, LoraOps, SlotMatrices, SlotRows, triton_ops

EPS, LAYERS, SLOTS, REPLAYS = 1e-6, 16, 8, 9
SHAPES = {"llama-8b": (4096, (4096, 1024, 1024), 14336), "qwen3-0.6b": (1024, (2048, 1024, 1024), 3072)}
OPS: LoraOps = triton_ops.OPS


def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers in bf16."""
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


@dataclass(slots=True, frozen=True)
class Product:
    """A weight, and the matrices of the slots."""

    weight: torch.Tensor
    matrices: SlotMatrices

    @classmethod
    def random(cls, size: int, parts: tuple[int, ...], rank: int) -> Product:
        """Full slots of that rank."""
        tiles, outputs = rank // TILE_RANK, sum(parts)
        first = make(SLOTS, tiles, len(parts), TILE_RANK, size, scale=size**-0.5)
        second = make(SLOTS, tiles, outputs, TILE_RANK, scale=rank**-0.5)
        num_tiles = torch.full((SLOTS,), tiles, dtype=torch.int32, device="cuda")
        pieces = triton_ops.part_tiles(parts, torch.device("cuda"))
        return cls(make(outputs, size, scale=size**-0.5), SlotMatrices(first, second, num_tiles, parts, pieces))

    def merged(self, slot: int) -> torch.Tensor:
        """The weight that a slot's adapter makes of it, in fp64."""
        found, start = [self.weight.double()], 0
        for part, size in enumerate(self.matrices.part_sizes):
            a = self.matrices.first[slot, :, part].flatten(0, 1).double()
            b = self.matrices.second[slot, :, start : start + size].transpose(0, 1).flatten(1).double()
            found.append(b @ a)
            start += size
        return found[0] + torch.cat(found[1:])


class Layer:
    """The products of one layer."""

    def __init__(self, shape: str, rank: int) -> None:
        hidden, projected, inner = SHAPES[shape]
        self.qkv = Product.random(hidden, projected, rank)
        self.out = Product.random(projected[0], (hidden,), rank)
        self.gate_up = Product.random(hidden, (inner, inner), rank)
        self.down = Product.random(inner, (hidden,), rank)
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")

    def sorted(self, slots: list[int]) -> SlotRows:
        """A step's tokens."""
        matrices = self.qkv.matrices
        own = torch.tensor(slots, dtype=torch.int32, device="cuda")
        return OPS.rows_by_slot(own, matrices.num_tiles, matrices.first.shape[1])

    def run(self, x: Any, residual: torch.Tensor, rows: SlotRows | None) -> tuple[Any, torch.Tensor]:
        """Normed x and the residual -> the next ones. `rows`: None for the products alone."""
        ops: LinearOps[Any] = triton_small.OPS if rows is None else OPS.linear

        def over(product: Product) -> Any:
            plain = product.weight
            return plain if rows is None else AdaptedWeight(triton_small.OPS, plain, product.matrices, rows)

        queries = ops.linear(x, over(self.qkv), None)[:, : self.out.weight.shape[1]].contiguous()
        x, residual = ops.linear_add_norm(queries, over(self.out), None, residual, self.norm, EPS, True)
        inner = ops.gated_linear(x, over(self.gate_up), None, "silu")
        return ops.linear_add_norm(inner, over(self.down), None, residual, self.norm, EPS, True)


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm over norm."""
    return float((found.double() - truth).norm() / truth.norm())


def check(layer: Layer, tokens: int, slots: list[int]) -> dict[str, float]:
    """Errors of each product against fp64, with adapters; whether tokens without one keep their bits."""
    x = make(tokens, layer.qkv.weight.shape[1])
    squares = x.float().square().view(tokens, 16, -1).sum(2)
    deferred = DeferredNorm(x, squares, EPS)
    normed = materialize(deferred).double()
    rows = layer.sorted(slots)
    base = torch.tensor([slot == NO_SLOT for slot in slots], device="cuda")
    inner = make(tokens, layer.down.weight.shape[1])

    def truth(product: Product, inputs: torch.Tensor) -> torch.Tensor:
        merged = {slot: product.merged(slot) if slot >= 0 else product.weight.double() for slot in set(slots)}
        return torch.stack([inputs[i].double() @ merged[slot].T for i, slot in enumerate(slots)])

    def both(product: Product, name: str, *args: Any) -> tuple[Any, Any]:
        adapted = AdaptedWeight(triton_small.OPS, product.weight, product.matrices, rows)
        with_, without = getattr(OPS.linear, name), getattr(triton_small.OPS, name)
        return with_(args[0], adapted, *args[1:]), without(args[0], product.weight, *args[1:])

    found: dict[str, float] = {}
    own, plain = both(layer.qkv, "linear", deferred, None)
    found["qkv"] = relative(own, truth(layer.qkv, normed))
    same = torch.equal(own[base], plain[base])
    own, plain = both(layer.gate_up, "gated_linear", deferred, None, "silu")
    found["gate_up"] = relative(own, act_and_mul(truth(layer.gate_up, normed), "silu"))
    found["gate_up_base_differs"] = relative(own[base], plain[base].double()) if bool(base.any()) else 0.0
    own, plain = both(layer.down, "linear_add_norm", inner, None, x, layer.norm, EPS, False)
    total = truth(layer.down, inner) + x.double()
    found["down"] = relative(own[1], total)
    found["down_norm"] = relative(own[0], rms_norm(total, layer.norm.double(), EPS))
    found["base_bits"] = float(same and torch.equal(own[1][base], plain[1][base]))
    return found


def graph_us(layers: list[Layer], tokens: int, slots: list[int] | None) -> float:
    """Microseconds of a layer."""
    x, residual = make(tokens, layers[0].qkv.weight.shape[1]), make(tokens, layers[0].qkv.weight.shape[1])
    rows = None if slots is None else layers[0].sorted(slots)

    def step() -> None:
        state: tuple[Any, torch.Tensor] = (x, residual)
        for layer in layers:
            state = layer.run(*state, rows)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * median(times) / len(layers)


CASES: dict[str, tuple[int, int]] = {"1, one": (1, 1), "32, one": (32, 1), "32, eight": (32, 8), "2000, one": (2000, 1)}


def main() -> None:
    """Check, time, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for rank in args.ranks:
        layers = [Layer(args.shape, rank) for _ in range(LAYERS)]
        for tokens, count in ((1, 1), (5, 3), (32, 8), (64, 2), (200, 3)):
            slots = [i % (count + 1) - 1 if tokens > 1 else 0 for i in range(tokens)]
            found[f"r{rank} check {tokens}"] = row = check(layers[0], tokens, slots)
            print(f"rank {rank}, {tokens} tokens:", {name: f"{value:.1e}" for name, value in row.items()}, flush=True)
        for name, (tokens, count) in CASES.items():
            base = graph_us(layers, tokens, None)
            own = graph_us(layers, tokens, [i % count for i in range(tokens)])
            idle = graph_us(layers, tokens, [NO_SLOT] * tokens)
            found[f"r{rank} {name}"] = {"base_us": base, "own_us": own, "idle_us": idle}
            print(
                f"rank {rank}, {name:10s}: {base:8.2f} us a layer, with adapters {own:8.2f} ({own / base:.3f} x, "
                f"+{own - base:.2f}), none in a slot {idle:8.2f}",
                flush=True,
            )
        del layers
        torch.cuda.empty_cache()
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
