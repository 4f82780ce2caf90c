"""Decode of requests that share a prefix: read once for all (`cascade_attention`) against once for each.

    python -m benchmarks.cascade [--shape llama-8b] [--batches 16 64 256] [--out results/cascade.json]

Each request has `--prefix` tokens in common with the others of its group (`--groups`: how many; 1) and `--own` of its
own. First one layer's attention, as
captured steps run it: each case one graph over several layers' caches, so that the L2 cache is cold and the host does
not count; `--tiles` sweeps the kernel's tile sizes. Then the engine's decode step with the option off and auto, timed
as benchmarks/latency.py does. Floors read the prefix once. Where there is no GPU: `TRITON_INTERPRET=1 ... --shape tiny
--prefix 512 --own 20 --batches 4 --steps 8`, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from app import LLM
from app.kernels.attention import AttentionMetadata, triton_decode
from app.kernels.attention.triton_cascade import CascadeTile, choose_cascade_tile, group_slots_of
from app.kernels.attention.triton_ops import OPS
from app.kernels.attention.triton_shared_splits import share_splits
from app.kernels.attention.triton_splits import most_splits
from benchmarks.offline import arguments, make_llm, random_prompt, timed, watched_steps, write
from benchmarks.roofline import BANDWIDTH, Floor
from benchmarks.shapes import SHAPES
from benchmarks.split_list import BLOCK, COLD_BYTES
from benchmarks.split_list import timed as graph_s

TILES = [
    CascadeTile(rows, keys, run, warps, stages)
    for rows, keys, warps, stages in (
        (32, 64, 4, 3),
        (64, 32, 4, 4),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 64, 8, 3),
    )
    for run in (1, 2, 4, 8)
]


class Layer:
    """One layer's attention over a shared prefix, in several copies of its cache."""

    def __init__(self, args: argparse.Namespace, batch: int, device: torch.device) -> None:
        s, prefix, own, groups = SHAPES[args.shape], args.prefix, args.own, min(args.groups, batch)
        self.heads, kv_heads, dim = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device, self.batch, self.length = device, batch, prefix + own
        shared, each = prefix // BLOCK, -(-own // BLOCK)
        order = torch.randperm(groups * shared + batch * each, device=device).int()
        self.table = torch.zeros(batch, shared + each, dtype=torch.int32, device=device)
        self.table[:, :shared] = order[: groups * shared].view(groups, shared)[torch.arange(batch) % groups]
        self.table[:, shared:] = order[groups * shared :].view(batch, each)
        self.read = 2 * kv_heads * dim * self.dtype.itemsize * (groups * prefix + batch * own)
        cache_shape = (len(order), 2, kv_heads, BLOCK, dim)
        copies = max(2, min(16, COLD_BYTES // self.read))
        self.caches = [torch.randn(cache_shape, dtype=self.dtype, device=device) for _ in range(copies)]
        self.query = torch.randn(batch, self.heads, dim, dtype=self.dtype, device=device)
        self.sizes = {"num_heads": self.heads, "num_kv_heads": kv_heads, "head_dim": dim, "block_size": BLOCK}

    def metadata(self, cascade: bool) -> AttentionMetadata:
        """The scratch of a static step."""
        meta = AttentionMetadata(
            query_start_loc=torch.arange(self.batch + 1, dtype=torch.int32, device=self.device),
            seq_lens=torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device),
            block_table=self.table,
            slot_mapping=torch.full((self.batch,), -1, dtype=torch.int64, device=self.device),
            max_query_len=1,
            max_seq_len=self.length,
            num_decodes=self.batch,
            is_static=True,
            cascade=cascade,
        )
        OPS.prepare(meta, **self.sizes)
        return meta

    def attend(self, meta: AttentionMetadata, cache: torch.Tensor) -> torch.Tensor:
        """[R, Hq, D]."""
        return OPS.paged_attention(self.query, cache, meta, scale=self.sizes["head_dim"] ** -0.5)

    def seconds(self, cascade: bool) -> float:
        """The time of one layer, its part of the lists not counted."""
        meta = self.metadata(cascade)
        self.attend(meta, self.caches[0])  # makes the lists

        def run() -> None:
            for cache in self.caches:
                self.attend(meta, cache)

        return graph_s(run, self.device) / len(self.caches)

    def lists_s(self) -> float:
        """The time of finding what is shared, once a step."""
        group = self.heads // self.sizes["num_kv_heads"]
        tile = choose_cascade_tile(self.batch * group, self.sizes["head_dim"], self.dtype)
        group_slots = group_slots_of(tile, group)
        keys = triton_decode.choose_tile(self.sizes["head_dim"], self.dtype).keys
        meta = self.metadata(cascade=True)
        most = most_splits(meta.max_seq_len)

        def run() -> None:
            share_splits(meta, most, keys, BLOCK, group_slots, tile.run)

        return graph_s(run, self.device)


def kernel_row(layer: Layer) -> dict[str, Any]:
    """Microseconds of a layer both ways."""
    separate, together = (layer.attend(layer.metadata(cascade), layer.caches[0]).double() for cascade in (False, True))
    off, on = layer.seconds(cascade=False), layer.seconds(cascade=True)
    return {
        "off_us": 1e6 * off,
        "cascade_us": 1e6 * on,
        "ratio": off / on,
        "cascade_fraction": layer.read / on / BANDWIDTH,
        "lists_us": 1e6 * layer.lists_s(),
        "largest_difference": float((separate - together).abs().max()),
    }


def tile_rows(layer: Layer) -> list[dict[str, Any]]:
    """Microseconds of a layer for every tile."""
    rows = []
    for tile in TILES:
        row: dict[str, Any] = asdict(tile)
        try:
            with patch.object(triton_decode, "choose_cascade_tile", lambda *_, tile=tile: tile):
                row["cascade_us"] = 1e6 * layer.seconds(cascade=True)
        except Exception as error:  # a tile that does not fit the device: the others are still worth it
            row["error"] = f"{type(error).__name__}: {str(error)[:120]}"
        print(row, flush=True)
        rows.append(row)
    return rows


def engine_row(llm: LLM, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """The decode step of requests whose prefix is in the cache."""
    rng = random.Random(0)
    prefixes = [random_prompt(rng, args.prefix, args.shape) for _ in range(min(args.groups, batch))]
    prompts = [prefixes[i % len(prefixes)] + random_prompt(rng, args.own, args.shape) for i in range(batch)]
    timed(llm, prefixes, [1] * len(prefixes))
    timed(llm, prompts, [2] * batch)
    short = timed(llm, prompts, [1] * batch)
    with watched_steps() as watch:
        long = timed(llm, prompts, [args.steps + 1] * batch)
    floor = Floor.of(args.shape)
    seconds = (
        floor.decode_s(batch, args.own + args.steps / 2) + len(prefixes) * args.prefix * floor.kv_bytes / BANDWIDTH
    )
    return {
        "step_ms": 1e3 * (long - short) / args.steps,
        "device_ms": 1e3 * median(watch.device),
        "floor_ms": 1e3 * seconds,
        "inputs_us": watch.p50_us("inputs"),
        "execute_us": watch.p50_us("execute"),
    }


def engine_rows(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """All batch sizes on one engine."""
    room = {"max_model_len": args.prefix + args.own + args.steps + 2, "enable_prefix_caching": True}
    options = {**room, "cascade_attention": mode, **args.engine}
    rows: dict[str, Any] = {}
    with make_llm(args.shape, **options) as llm:
        print(f"-- cascade_attention={mode}", *llm.worker_info.notes, sep="\n", flush=True)
        for batch in args.batches:
            rows[str(batch)] = row = engine_row(llm, args, batch)
            print(f"{batch} requests: {shown(row)}", flush=True)
    return rows


def shown(row: dict[str, Any]) -> str:
    """One line of the table."""
    return ", ".join(f"{name} {value:.3g}" for name, value in row.items())


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__, shape="llama-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--prefix", type=int, default=8192, help="tokens in common")
    parser.add_argument("--groups", type=int, default=1, help="prefixes there are")
    parser.add_argument("--own", type=int, default=128, help="tokens of each request alone")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--only", choices=["kernels", "engine"])
    parser.add_argument("--tiles", action="store_true", help="sweep the kernel's tile sizes too")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, Any] = {"shape": args.shape, "prefix": args.prefix, "own": args.own, "groups": args.groups}
    if args.only != "engine":
        with torch.inference_mode():
            for batch in args.batches:
                layer = Layer(args, batch, device)
                figures[f"layer {batch}"] = row = kernel_row(layer)
                print(f"one layer, {batch} requests: {shown(row)}", flush=True)
                if args.tiles:
                    figures[f"tiles {batch}"] = tile_rows(layer)
                write(args.out, figures)
    if args.only != "kernels":
        for mode in ("off", "auto"):
            figures[mode] = engine_rows(args, mode)
            write(args.out, figures)
        for batch in map(str, args.batches):
            off, auto = figures["off"][batch], figures["auto"][batch]
            ratios = {f"{name[:-3]}_ratio": off[name] / auto[name] for name in ("step_ms", "device_ms")}
            figures[f"speed-up {batch}"] = ratios
            print(f"{batch} requests, off / auto: {shown(ratios)}", flush=True)
        write(args.out, figures)


if __name__ == "__main__":
    main()
