"""What a plain static step costs the host: from its message to its output, the device's work left out.

    python -m benchmarks.host_step [--rows 1 32 256] [--beside TREE] [--rounds 7]

A worker of the built-in model on the CPU is driven with hand-written step messages of rows that decode. Its static step
launches nothing, where a GPU's would replay two graphs: what is left is the host's way through the worker, in
microseconds, the median of a round's steps and the least of the rounds. With `--beside`, the root of another working
tree, rounds of both trees take turns, and the ratio is of both in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from app.config.engine import EngineConfig
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import NewRequest, SchedulerOutput
from app.worker.graphs.static_step import StaticStep, StepKey
from app.worker.worker import Worker

ROOT = Path(__file__).resolve().parents[1]
PROMPT, STEPS, BLOCK_SIZE = 8, 1500, 16


class Silent(StaticStep):
    """A step of which nothing is launched."""

    def forward(self, key: StepKey) -> None:
        """Does nothing."""

    def sample(self, key: StepKey) -> None:
        """Does nothing."""


def measure(num_rows: int) -> float:
    """Microseconds of a step."""
    blocks_each = (PROMPT + STEPS) // BLOCK_SIZE + 1
    worker = Worker(
        EngineConfig(
            model="tiny-chat",
            device="cpu",
            num_threads=1,
            max_num_seqs=num_rows,
            max_model_len=2048,
            block_size=BLOCK_SIZE,
            num_blocks=num_rows * blocks_each,
        )
    )
    worker.start()
    runner = worker._runner
    assert runner is not None
    with torch.inference_mode():
        runner._static = Silent(runner._forward, runner._state, runner._features, [num_rows])
    rows, ones = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, dtype=np.int32)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=STEPS)
    entering = [
        NewRequest(
            row=row,
            token_ids=np.zeros(PROMPT, dtype=np.int32),
            num_prompt_tokens=PROMPT,
            num_computed_tokens=PROMPT - 1,
            block_ids=list(range(row * blocks_each, (row + 1) * blocks_each)),
            spec=EngineRequest(f"r{row}", [], params, 0),
            eos_token_ids=(),
        )
        for row in range(num_rows)
    ]
    seconds = []
    for step_id in range(STEPS):
        message = SchedulerOutput(step_id, rows, ones, np.ones(num_rows, dtype=np.bool_))
        message.new_requests = entering if step_id == 0 else []
        begin = time.perf_counter()
        worker.execute(message)
        seconds.append(time.perf_counter() - begin)
    worker.shutdown()
    return 1e6 * median(seconds[STEPS // 5 :])


def round_of(tree: Path, rows: list[int]) -> list[float]:
    """A process of its own, over the tree's modules."""
    command = [sys.executable, __file__, "--one", "--rows", *map(str, rows)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree, capture_output=True, text=True, check=True
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--beside", type=Path, help="root of another working tree")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps([measure(count) for count in args.rows]))
        return
    trees = [ROOT] if args.beside is None else [ROOT, args.beside.resolve()]
    rounds = [[round_of(tree, args.rows) for tree in trees] for _ in range(args.rounds)]
    for index, count in enumerate(args.rows):
        here, *there = (min(found[tree][index] for found in rounds) for tree in range(len(trees)))
        beside = "".join(f"; beside it {other:.1f} us, here / there {here / other:.2f}" for other in there)
        print(f"{count} rows: {here:.1f} us{beside}")


if __name__ == "__main__":
    main()
