"""The sum over the GPUs of one host, by message size: symmetric memory (one and two shots) against NCCL, and the table.

    python -m benchmarks.all_reduce --ranks 4 [--out FILE]

Each kind is checked against the exact sum first. At the end it prints the line for `MEASURED` in
app/distributed/symmetric_all_reduce.py. `--device cpu` times gloo alone, to try the command.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.distributed.parallel_groups import RankGroup
from app.distributed.process_groups import RankStore, connect_store, join_groups
from app.distributed.symmetric_all_reduce import SymmetricAllReduce, empty_buffer
from app.engine.executor.worker_group_executor import LOCAL_HOST

SIZES = [1 << power for power in range(10, 25)]  # bytes, 1 KiB to 16 MiB
NEVER, ALWAYS = 0, 1 << 24
REPEATS = 50


def candidates(group: RankGroup, device: torch.device) -> dict[str, Callable[[torch.Tensor], Any]]:
    """The ways to sum up. One that cannot be had is left out, and said."""
    found: dict[str, Callable[[torch.Tensor], Any]] = {"library": group.all_reduce}
    if device.type == "cuda":
        for name, limits in {"one_shot": (ALWAYS, ALWAYS), "two_shot": (NEVER, ALWAYS)}.items():
            try:
                found[name] = SymmetricAllReduce(group, empty_buffer(torch.bfloat16, device, limits), limits)
            except Exception as error:
                print(f"rank {group.rank}: {name}: {type(error).__name__}: {error}", flush=True)
    return found


def time_us(work: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> float:
    """Microseconds a call, many in a row; on a GPU from a captured graph, as decode steps run."""
    if tensor.device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(REPEATS):
            work(tensor)
        return 1e6 * (time.perf_counter() - begin) / REPEATS
    for _ in range(3):
        work(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            work(tensor)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / REPEATS


def check(reduce: Callable[[torch.Tensor], Any], group: RankGroup, count: int, device: torch.device) -> None:
    """Small integers, whose sums bfloat16 holds exactly."""
    tensor = ((torch.arange(count, device=device) % 8) + group.rank).bfloat16()
    reduce(tensor)
    expected = group.size * (torch.arange(count, device=device) % 8) + sum(range(group.size))
    assert torch.equal(tensor, expected.bfloat16()), "wrong sum"


def rank_main(rank: int, ranks: int, device_type: str, address: tuple[str, int], results: Any) -> None:
    """Measure all sizes; rank 0 reports."""
    group, device = join(rank, ranks, device_type, address)
    ways = candidates(group, device)
    table: dict[str, dict[int, float]] = {name: {} for name in ways}
    for size in SIZES:
        for name, reduce in ways.items():
            check(reduce, group, size // 2, device)
            table[name][size] = time_us(reduce, torch.zeros(size // 2, dtype=torch.bfloat16, device=device))
    if rank == 0:
        results.put(table)


def limits(table: dict[str, dict[int, float]]) -> tuple[int, int]:
    """The largest sizes up to which one shot, then two shots, were the fastest all along."""
    one = two = 0
    for size in SIZES:
        best = min(table, key=lambda name: table[name][size])
        if best == "one_shot" and two == one:
            one = two = size
        elif best != "library":
            two = size
        else:
            break
    return one, two


def run_ranks(rank_main: Callable[..., None], ranks: int, device_type: str) -> Any:
    """What rank 0 puts into the queue that is the last argument of rank_main(rank, ranks, device_type, address, queue).

    RuntimeError where a rank fails, or none answers for five minutes.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = RankStore(LOCAL_HOST, ranks)
    common = (ranks, device_type, store.address, results)
    processes = [context.Process(target=rank_main, args=(rank, *common), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 300
    while results.empty():
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank failed")
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks have not answered for five minutes")
        time.sleep(0.1)
    return results.get()


def join(rank: int, ranks: int, device_type: str, address: tuple[str, int]) -> tuple[RankGroup, torch.device]:
    """This process's place among the ranks, and its device, made current."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    return join_groups(connect_store(address, ranks), rank, ranks, 1, device, LOCAL_HOST).tp, device


def main() -> None:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    table: dict[str, dict[int, float]] = run_ranks(rank_main, args.ranks, args.device)
    for size in SIZES:
        print(f"{size:>9} bytes", "  ".join(f"{name} {table[name][size]:8.1f} us" for name in table))
    print(f"MEASURED = {{{args.ranks}: {limits(table)}}}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"ranks": args.ranks, "device": args.device, "us": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
