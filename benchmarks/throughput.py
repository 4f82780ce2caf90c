"""Offline throughput of the engine on random weights: 256 requests, in and out uniform 100-1024.

    python -m benchmarks.throughput --shape qwen3-0.6b [--requests 256] [--out results/throughput.json]

The workload is nano-vllm's and the one of the vLLM figures in RESULTS.md: lengths from `random.Random(0)`, drawn
(in, out) in turn; `ignore_eos`, temperature 1. Then the decode step time at several batch sizes, from the time of
512-token prompts with 129 output tokens less the time with one, over 128.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from app import LLM, SamplingParams
from benchmarks.serve_process import ROOT
from benchmarks.shapes import SHAPES, write_shape


def _timed(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=n, seed=i) for i, n in enumerate(lengths)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - begin
    assert [len(out.outputs[0].token_ids) for out in outputs] == lengths
    return elapsed


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(0, 10_000) for _ in range(length)]


def main() -> None:
    """Run the workload, print one table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128, 256])
    parser.add_argument("--engine", default="{}", help="further engine options, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "model": str(write_shape(args.shape, Path(folder))), "tokenizer": str(ROOT / "app/assets/tiny-chat"),
            "load_format": "dummy", "max_model_len": 12288, "enable_prefix_caching": False, "max_num_seqs": 256,
            "max_num_batched_tokens": 8192, **json.loads(args.engine),
        }  # fmt: skip
        begin = time.perf_counter()
        llm = LLM(**options)
        figures: dict[str, Any] = {"shape": args.shape, "start_s": time.perf_counter() - begin}

    rng = random.Random(0)
    pairs = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(args.requests)]
    prompts = [_prompt(rng, length) for length, _ in pairs]
    _timed(llm, prompts[:4], [8] * 4)
    figures["output_tokens_per_s"] = sum(n for _, n in pairs) / _timed(llm, prompts, [n for _, n in pairs])
    decode = {}
    for batch in args.batches:
        prompts = [_prompt(rng, 512) for _ in range(batch)]
        decode[batch] = 1e3 * (_timed(llm, prompts, [129] * batch) - _timed(llm, prompts, [1] * batch)) / 128
    figures["decode_step_ms"] = decode
    figures["prefill_ms"] = {n: 1e3 * _timed(llm, [_prompt(rng, n)], [1]) for n in (2048, 8192)}

    print(f"| {args.shape} | value |\n|---|---|")
    print(f"| start, s | {figures['start_s']:.1f} |")
    print(f"| {args.requests} requests, output tok/s | {figures['output_tokens_per_s']:,.0f} |")
    for batch, step_ms in decode.items():
        print(f"| decode step at batch {batch}, ms | {step_ms:.2f} |")
    for length, ms in figures["prefill_ms"].items():
        print(f"| prefill of {length} tokens, ms | {ms:.1f} |")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
