"""Tokens/s through HTTP at 1, 16 and 64 streams, against the same engine driven in process, in one run.

    python -m benchmarks.http_vs_engine [--config configs/serve/quickstart.yaml] [--out results/bench.json]

The engine alone is `LLM` in a process of its own, with as many requests at a time: once with the CPU threads that the
served worker has, and once with a thread for every core. All use the same prompts, greedy, `ignore_eos` and a fixed
number of output tokens. Each figure is the median of `--repeats`; the engine alone on the worker's threads is measured
before the server and again after it, and the mean of both counts, as the machine's speed may drift.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from app.cli.stream_client import Server, run_streams
from benchmarks.serve_process import ROOT, ServeProcess

STREAMS = (1, 16, 64)


def _prompts(count: int) -> list[str]:
    return [f"Question {i}: what is {i} + {3 * i + 1}? Please tell me a long story about it." for i in range(count)]


def _engine_alone(config: dict[str, Any], streams: tuple[int, ...], num_tokens: int, repeats: int) -> dict[str, Any]:
    """Runs in a child process, so that its memory and threads are gone when the server starts."""
    from app import LLM, SamplingParams

    llm = LLM(**{**config, "executor": "in_process"})
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm.generate(_prompts(2), params, use_tqdm=False)
    figures: dict[str, Any] = {}
    for count in streams:
        rates = []
        for _ in range(repeats):
            begin = time.perf_counter()
            outputs = llm.generate(_prompts(count), params, use_tqdm=False)
            elapsed = time.perf_counter() - begin
            rates.append(sum(len(choice.token_ids) for out in outputs for choice in out.outputs) / elapsed)
        figures[str(count)] = statistics.median(rates)
    return figures


def _through_http(server: ServeProcess, model: str, count: int, num_tokens: int, repeats: int) -> dict[str, float]:
    bodies = [
        {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        for prompt in _prompts(count)
    ]
    rates, cpu, ttft, itl = [], [], [], []
    for _ in range(repeats):
        cpu_begin, begin = server.cpu_time_s(), time.perf_counter()
        results = asyncio.run(run_streams(Server(server.base_url), bodies, count))
        elapsed = time.perf_counter() - begin
        errors = [result.error for result in results if result.error]
        if errors:
            raise RuntimeError(errors[0])
        tokens = sum(result.num_tokens for result in results)
        rates.append(tokens / elapsed)
        cpu.append((server.cpu_time_s() - cpu_begin) / elapsed)
        ttft += [result.ttft_s for result in results]
        itl += [b - a for r in results for a, b in zip(r.event_times, r.event_times[1:], strict=False)]
    return {
        "tokens_per_s": statistics.median(rates),
        "server_cores": statistics.median(cpu),
        "ttft_p50_s": statistics.median(ttft),
        "itl_p50_s": statistics.median(itl),
    }


def _engine_in_child(options: dict[str, Any], num_tokens: int, repeats: int) -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.http_vs_engine", "--engine-alone", json.dumps(options),
         "--tokens", str(num_tokens), "--repeats", str(repeats)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = next((line for line in child.stdout.splitlines() if line.startswith("FIGURES ")), None)
    if line is None:
        raise RuntimeError(child.stderr[-3000:])
    figures: dict[str, float] = json.loads(line.removeprefix("FIGURES "))
    return figures


def main() -> None:
    """Run both, print one table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs/serve/quickstart.yaml"))
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine-alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine_alone:
        figures = _engine_alone(json.loads(args.engine_alone), STREAMS, args.tokens, args.repeats)
        print("FIGURES " + json.dumps(figures))
        return

    model = yaml.safe_load(Path(args.config).read_text())["applications"][0]["args"]["models"][0]
    options = model.get("engine", {})
    cores = len(os.sched_getaffinity(0))
    threads = options.get("num_threads") or max(1, cores - 1)
    before = _engine_in_child({**options, "num_threads": threads}, args.tokens, args.repeats)
    engine_all = _engine_in_child({**options, "num_threads": cores}, args.tokens, args.repeats)
    with ServeProcess(args.config) as server:
        _through_http(server, model["name"], 4, 16, 1)
        http = {str(n): _through_http(server, model["name"], n, args.tokens, args.repeats) for n in STREAMS}
        start_s = server.start_time_s
    after = _engine_in_child({**options, "num_threads": threads}, args.tokens, args.repeats)
    engine = {n: (before[n] + after[n]) / 2 for n in before}

    print(f"{model['name']}, {cores} cores, {args.tokens} output tokens, medians of {args.repeats} runs")
    print(
        f"| streams | engine alone, tok/s, threads: {threads} | threads: {cores} | through HTTP, threads: {threads} "
        "| ratio | server cores | TTFT p50, ms | ITL p50, ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for n in STREAMS:
        row, alone = http[str(n)], engine[str(n)]
        print(
            f"| {n} | {alone:,.0f} | {engine_all[str(n)]:,.0f} | {row['tokens_per_s']:,.0f} "
            f"| {row['tokens_per_s'] / alone:.2f} | {row['server_cores']:.2f} | {1e3 * row['ttft_p50_s']:.1f} "
            f"| {1e3 * row['itl_p50_s']:.1f} |"
        )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        machine = {"cores": cores, "threads": threads, "python": platform.python_version(), "start_s": start_s}
        figures = {
            "engine_alone": engine,
            "engine_alone_before": before,
            "engine_alone_after": after,
            "engine_alone_all_cores": engine_all,
            "http": http,
            "machine": machine,
        }
        args.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
