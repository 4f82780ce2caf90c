"""Drawing a token from logits whose vocabulary is split over the GPUs of one host: gather them, or draw from the parts.

    python -m benchmarks.logits --ranks 2 [--vocab 128256] [--out FILE]

`gathered`: all logits on every rank, then one pass over them, as decode steps do. `sharded`: one pass over each rank's
part, then the winners' values and numbers are gathered and compared. The pass is the argmax of the logits, which is
what sampling by temperature alone comes to (with Gumbel noise on them); top-k and top-p want the whole row. Times as in
benchmarks/all_reduce.py; both ways are checked against each other first. `--device cpu` tries the command.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app.distributed.parallel_groups import RankGroup
from benchmarks.all_reduce import join, run_ranks, time_us
from benchmarks.offline import write

ROWS = (1, 8, 32, 128, 256)


def gathered(group: RankGroup, local: torch.Tensor) -> torch.Tensor:
    """bf16 [N, V / ranks] -> int64 [N]."""
    return group.all_gather(local).argmax(dim=-1)


def sharded(group: RankGroup, local: torch.Tensor) -> torch.Tensor:
    """The same as `gathered`, from each rank's part."""
    values, numbers = local.max(dim=-1)
    numbers += group.rank * local.shape[1]
    pairs = torch.stack([values.double(), numbers.double()], dim=-1)  # fp64 holds both exactly
    best = group.all_gather(pairs, dim=-1).view(len(local), group.size, 2)
    winner = best[:, :, 0].argmax(dim=-1, keepdim=True)
    return best[:, :, 1].gather(1, winner).squeeze(1).long()


def rank_main(vocab: int, rank: int, ranks: int, device_type: str, address: tuple[str, int], results: Any) -> None:
    """Measure all numbers of rows; rank 0 reports."""
    group, device = join(rank, ranks, device_type, address)
    table: dict[str, dict[int, float]] = {"gathered": {}, "sharded": {}}
    for rows in ROWS:
        generator = torch.Generator(device).manual_seed(rank)
        local = torch.randn(rows, vocab // ranks, generator=generator, device=device)
        assert torch.equal(gathered(group, local), sharded(group, local)), "the ways differ"
        local = local.bfloat16()
        for name, way in (("gathered", gathered), ("sharded", sharded)):
            table[name][rows] = time_us(partial(way, group), local)
    if rank == 0:
        results.put(table)


def main() -> None:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    table: dict[str, dict[int, float]] = run_ranks(partial(rank_main, args.vocab), args.ranks, args.device)
    for rows in ROWS:
        print(f"{rows:>4} rows", "  ".join(f"{name} {table[name][rows]:8.1f} us" for name in table))
    write(args.out, {"ranks": args.ranks, "vocab": args.vocab, "us": table})


if __name__ == "__main__":
    main()
