"""Engines of several ranks, started and stopped again and again: what they leave behind.

    python -m benchmarks.start_stop [--cycles 100] [--beside 8] [--ranks 2] [--one-gpu] [--out results/start_stop.json]

The built-in model, on an otherwise idle machine. Each cycle starts the ranks, generates a few tokens and stops;
`--beside` such loops run at a time. Afterwards no process, no shared-memory segment and no device memory may be left,
and all answers must be the same. `--one-gpu`: all ranks share the first GPU (benchmarks/one_gpu.py).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from app import LLM, SamplingParams
from benchmarks.offline import write
from benchmarks.one_gpu import worker_groups_on_one_gpu

PARAMS = SamplingParams(temperature=0, max_tokens=8)
MOST_MIB = 64  # that a device's own use may differ
SMALL = {"num_blocks": 512, "max_num_seqs": 8}


def cycles(count: int, ranks: int, one_gpu: bool, engine: dict[str, Any]) -> dict[str, Any]:
    """One loop: seconds of each cycle, the answers, and the memory of this process, in MiB, on the way."""
    seconds, answers, pids, memory = [], set(), [], []
    for _ in range(count):
        begin = time.perf_counter()
        options = {"tensor_parallel_size": ranks, **SMALL, **engine}
        with worker_groups_on_one_gpu(one_gpu), LLM("tiny-chat", **options) as llm:
            (choice,) = llm.generate("The capital of France", PARAMS, use_tqdm=False)[0].outputs
            answers.add(tuple(choice.token_ids))
            pids += llm._core.executor.worker_pids  # type: ignore[attr-defined]
        seconds.append(time.perf_counter() - begin)
        memory.append(psutil.Process().memory_info().rss >> 20)
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = sum(map(psutil.pid_exists, pids))
    return {"seconds": seconds, "answers": [list(answer) for answer in answers], "left": left, "memory": memory}


def device_mib() -> list[int]:
    """Memory in use of each GPU; nothing where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return [
            int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        ]
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []


def main() -> None:
    """Run the loops, print, write JSON; exit 1 when anything is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--beside", type=int, default=8)
    parser.add_argument("--ranks", type=int, choices=[2, 4, 8], default=2)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    if args.cycles < 1 or args.beside < 1:
        parser.error("--cycles and --beside must be at least 1")
    before, segments, beside = device_mib(), set(os.listdir("/dev/shm")), min(args.beside, args.cycles)
    counts = [len(range(i, args.cycles, beside)) for i in range(beside)]
    with concurrent.futures.ProcessPoolExecutor(beside, multiprocessing.get_context("spawn")) as pool:
        loops = list(pool.map(cycles, counts, [args.ranks] * beside, [args.one_gpu] * beside, [args.engine] * beside))
    seconds = [s for loop in loops for s in loop["seconds"]]
    figures = {
        "cycles": len(seconds),
        "seconds_p50": median(seconds),
        "seconds_max": max(seconds),
        "processes_left": sum(loop["left"] for loop in loops),
        "segments_left": len(set(os.listdir("/dev/shm")) - segments),
        "different_answers": len({tuple(answer) for loop in loops for answer in loop["answers"]}),
        "process_mib_after_first_and_last": [[loop["memory"][0], loop["memory"][-1]] for loop in loops],
        "device_mib_before": before,
        "device_mib_after": device_mib(),
    }
    print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n", flush=True)
    write(args.out, figures)
    grown = any(after > MOST_MIB + earlier for earlier, after in zip(before, figures["device_mib_after"], strict=True))
    raise SystemExit(
        int(figures["processes_left"] > 0 or figures["segments_left"] > 0 or figures["different_answers"] > 1 or grown)
    )


if __name__ == "__main__":
    main()
