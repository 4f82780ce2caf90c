"""What a step costs on the CPU: decode and prefill at the worker, then tokens/s against transformers.

    python -m benchmarks.cpu_step [--models tiny-chat llama-100m] [--dtypes float32 bfloat16] [--threads N] [--no-hf]
        [--out results/cpu_step.json]

A worker is driven with hand-written step messages, blocks coming from the real BlockPool; a step's time is the worker's
own and the figure is the least of several steps, because other jobs on the machine only ever add to it. The comparison
runs the whole engine (`LLM`) and, in turns with it, `generate` of transformers, in the same type and with as many
threads, on the same prompts, greedy, without a stop token, and takes the best of `--repeats`. `generate_batch` comes
after all else: once it has run, everything in the process takes 15 to 20 % longer (its own later figures too).
llama-100m has random weights (benchmarks/shapes.py).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from app import LLM, SamplingParams
from app.checkpoints.model_info import resolve_model
from app.config.engine import EngineConfig
from app.engine.kv_cache.block_pool import BlockPool
from app.records.request import EngineRequest
from app.records.step import NewRequest, SchedulerOutput
from app.worker.worker import Worker
from benchmarks.serve_process import ROOT
from benchmarks.shapes import write_shape

BUILT_IN = "tiny-chat"
CHUNK = 2048  # most tokens of a step
VOCAB = 1000
BATCHES = [1, 8, 32]  # those of the comparison
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


class Batch:
    """`size` requests of `context` tokens each on a fresh set of blocks, from prefill to decode."""

    def __init__(self, worker: Worker, num_blocks: int, block_size: int, size: int, context: int) -> None:
        self._worker, self._block_size = worker, block_size
        self._pool = BlockPool(num_blocks)
        self._rows = np.arange(size, dtype=np.int32)
        self._context = context
        self._blocks = [0] * size
        self._step_id = 0

    def prefill(self) -> float:
        """All prompts, at most CHUNK tokens a step; returns the seconds they took."""
        rng = np.random.default_rng(0)
        per_step = max(1, CHUNK // self._context)
        seconds, spec = 0.0, EngineRequest("r", [], GREEDY)
        for first in range(0, len(self._rows), per_step):
            rows = self._rows[first : first + per_step]
            new = [
                NewRequest(
                    int(row), rng.integers(0, VOCAB, self._context, dtype=np.int32), self._context, 0, [], spec, ()
                )
                for row in rows
            ]
            seconds += self._step(rows, self._context, new)
        return seconds

    def decode(self) -> float:
        """One token for each request; returns the seconds."""
        self._context += 1
        return self._step(self._rows, 1, [])

    def leave(self) -> None:
        """Free the rows."""
        none = np.zeros(0, dtype=np.int32)
        freed = self._rows.tolist()
        self._worker.execute(SchedulerOutput(0, none, none, none.astype(np.bool_), freed_rows=freed))

    def _step(self, rows: np.ndarray, count: int, new: list[NewRequest]) -> float:
        blocks = []
        for row in rows.tolist():
            need = -(-self._context // self._block_size) - self._blocks[row]
            if need > 0:
                blocks.append((row, self._pool.take(need)))
                self._blocks[row] += need
        self._step_id += 1
        counts, samples = np.full(len(rows), count, dtype=np.int32), np.ones(len(rows), dtype=np.bool_)
        return self._worker.execute(SchedulerOutput(self._step_id, rows, counts, samples, new, blocks))[0].step_time_s


def step_figures(options: dict[str, Any], cases: list[tuple[int, int]], steps: int) -> dict[str, float]:
    """Least decode step in ms for each (batch, context), and prefill tokens/s."""
    config = EngineConfig(max_num_batched_tokens=CHUNK, max_num_seqs=64, max_model_len=2048, **options)
    worker = Worker(config)
    num_blocks = worker.start().num_blocks
    figures = {}
    for size, context in cases:
        batch = Batch(worker, num_blocks, config.block_size, size, context)
        batch.prefill()
        figures[f"decode step, batch {size}, context {context}, ms"] = 1e3 * min(batch.decode() for _ in range(steps))
        batch.leave()
    seconds = []
    for _ in range(3):
        batch = Batch(worker, num_blocks, config.block_size, 8, 250)
        seconds.append(batch.prefill())
        batch.leave()
    figures["prefill, tokens/s"] = 8 * 250 / min(seconds)
    worker.shutdown()
    return figures


def ours(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds for `num_tokens` tokens of each prompt."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def transformers(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """The same with `generate`."""
    ids = torch.tensor(prompts)
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return time.perf_counter() - begin


def transformers_batch(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """The same with `generate_batch`, its continuous batching."""
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    begin = time.perf_counter()
    answers = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    seconds = time.perf_counter() - begin
    made = [len(answer.generated_tokens) for answer in answers.values()]
    assert made == [num_tokens] * len(prompts), made
    return seconds


def transformers_model(options: dict[str, Any], directory: Path) -> Any:
    """The same shape, in the same type."""
    dtype = getattr(torch, options["dtype"])
    if options["load_format"] == "dummy":
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype).eval()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def some_prompts(size: int) -> list[list[int]]:
    """Prompts of 32 tokens; 64 more are generated for each."""
    prompts: list[list[int]] = np.random.default_rng(size).integers(3, VOCAB, (size, 32)).tolist()
    return prompts


def rates(options: dict[str, Any], directory: Path, batches: list[int], repeats: int) -> dict[str, float]:
    """Output tokens/s of the engine and of `generate`."""
    llm = LLM(max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False, **options)
    hf = transformers_model(options, directory)
    figures = {}
    for size in batches:
        prompts = some_prompts(size)
        # In turns, so that a slow minute of the machine hits both.
        rounds = [(ours(llm, prompts, 64), transformers(hf, prompts, 64)) for _ in range(repeats)]
        engine, generate = map(min, zip(*rounds, strict=True))
        figures[f"engine, batch {size}, tokens/s"] = size * 64 / engine
        figures[f"generate, batch {size}, tokens/s"] = size * 64 / generate
        figures[f"engine / generate, batch {size}"] = generate / engine
    llm.shutdown()
    return figures


def add_batch_rates(
    figures: dict[str, float], options: dict[str, Any], directory: Path, batches: list[int], repeats: int
) -> None:
    """The same of `generate_batch`."""
    hf = transformers_model(options, directory)
    for size in batches:
        rate = size * 64 / min(transformers_batch(hf, some_prompts(size), 64) for _ in range(repeats))
        figures[f"generate_batch, batch {size}, tokens/s"] = rate
        figures[f"engine / generate_batch, batch {size}"] = figures[f"engine, batch {size}, tokens/s"] / rate


def main() -> None:
    """Measure, print one table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[BUILT_IN, "llama-100m"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each core")
    parser.add_argument("--steps", type=int, default=10, help="decode steps of which the fastest counts")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the comparison of which the fastest counts")
    parser.add_argument("--no-hf", action="store_true", help="leave out the comparison with transformers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        compared = []
        for name, dtype in itertools.product(args.models, args.dtypes):
            built_in = name == BUILT_IN
            directory = resolve_model(name) if built_in else write_shape(name, Path(folder))
            options = {
                "model": str(directory), "tokenizer": str(ROOT / "app/assets" / BUILT_IN), "device": "cpu",
                "dtype": dtype, "num_threads": args.threads, "load_format": "safetensors" if built_in else "dummy",
            }  # fmt: skip
            cases = [(1, 20), (8, 20), (64, 20), (1, 500), (8, 500), (64, 500), (8, 1500)]
            figures = table[f"{name}, {dtype}"] = step_figures(options, cases, args.steps)
            gc.collect()
            if not args.no_hf:
                figures |= rates(options, directory, BATCHES, args.repeats)
                compared.append((figures, options, directory))
        for figures, options, directory in compared:
            add_batch_rates(figures, options, directory, BATCHES, args.repeats)
    print(f"| {args.threads} thread(s) | " + " | ".join(table) + " |")
    print("|---" * (len(table) + 1) + "|")
    for line in next(iter(table.values())):
        print(f"| {line} | " + " | ".join(f"{column[line]:,.2f}" for column in table.values()) + " |")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"threads": args.threads, "torch": torch.__version__, **table}, indent=2))


if __name__ == "__main__":
    main()
