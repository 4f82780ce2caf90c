"""`manta bench`: the serving benchmark, against any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from app.cli.bench.driver import PATHS, Run, drive, request_body
from app.cli.bench.metrics import METRICS, calculate, output_tokens, parse_goodput, percentile_key
from app.cli.bench.workload import Shape, Work, arrival_times, random_work, read_work, token_source
from app.cli.command import Command, CommandError
from app.cli.numbers import at_least, between, positive
from app.cli.server_options import add_server, server_given
from app.cli.server_queries import choose_model
from app.cli.stream_client import Server
from app.errors import ConfigError

TITLES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency",
          "e2el": "end-to-end latency"}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Server, load, lengths, what to report."""
    server = parser.add_argument_group("server")
    add_server(server)
    server.add_argument("--endpoint", choices=list(PATHS), default="completions", help="(default: %(default)s)")

    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=at_least(1), default=200, metavar="N", help="requests (default: 200)")
    load.add_argument("--request-rate", type=positive, default=math.inf, metavar="X",
                      help="requests a second; inf sends all at once (default: inf)")  # fmt: skip
    load.add_argument("--burstiness", type=positive, default=1.0, metavar="X",
                      help="1: Poisson arrivals, less: bursts, inf: even (default: 1)")  # fmt: skip
    load.add_argument("--max-concurrency", type=at_least(1), metavar="N", help="requests in flight (default: no limit)")
    load.add_argument("--num-warmups", type=at_least(0), default=1, metavar="N",
                      help="requests sent before, not measured (default: 1)")  # fmt: skip

    work = parser.add_argument_group("requests")
    work.add_argument("--input-len", type=at_least(1), default=1024, metavar="N", help="prompt tokens (default: 1024)")
    work.add_argument("--output-len", type=at_least(1), default=128, metavar="N", help="output tokens (default: 128)")
    work.add_argument("--prefix-len", type=at_least(0), default=0, metavar="N",
                      help="tokens before the prompt that are the same for all (default: 0)")  # fmt: skip
    work.add_argument("--range-ratio", type=between(0, 1), default=0.0, metavar="X",
                      help="draw lengths from length * (1 +- X) (default: 0)")  # fmt: skip
    work.add_argument("--dataset", type=Path, metavar="FILE", help='JSONL of {"prompt": ..., "output_len": N} instead')
    work.add_argument("--tokenizer", metavar="DIR", help="draw tokens from it (default: from the server's /tokenize)")
    work.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    work.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                      help="ask for answers of the full length; not every server takes it (default: yes)")  # fmt: skip
    work.add_argument("--extra-body", default="{}", metavar="JSON", help='more fields, such as {"temperature": 0}')

    report = parser.add_argument_group("report")
    report.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                        help="objectives that a good request meets, such as ttft:500 tpot:30 e2el:5000")  # fmt: skip
    report.add_argument("--percentiles", default="50,90,99", metavar="P,P,...", help="(default: %(default)s)")
    report.add_argument("-o", "--out", type=Path, metavar="FILE", help="write all figures as JSON")
    report.add_argument("--save-detailed", action="store_true", help="with the figures of each request")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON; 1 when a request failed."""
    percentiles, goodput, extra = _percentiles(args.percentiles), parse_goodput(args.goodput), _extra(args)
    server = server_given(args)
    model = choose_model(server, args.model)
    rng = np.random.default_rng(args.seed)
    warm, work = _work(args, server, model, rng)
    times = arrival_times(len(work), args.request_rate, args.burstiness, rng)
    done = asyncio.run(_measure(args, server, model, warm, work, times, extra))
    figures = calculate(done.results, done.duration_s, percentiles, goodput)
    _print(figures, percentiles, args)
    errors = [result.error for result in done.results if result.error]
    for error in list(dict.fromkeys(errors))[:5]:
        print(f"failed: {errors.count(error)} x {error}", file=sys.stderr)
    if args.out is not None:
        _write(args, model, figures, done)
    return 1 if errors else 0


def _work(
    args: argparse.Namespace, server: Server, model: str, rng: np.random.Generator
) -> tuple[list[Work], list[Work]]:
    """The warm-up requests, which share no prompt with the measured ones, and those."""
    if args.dataset is not None:
        work = read_work(args.dataset, args.num_prompts, args.output_len)
        return [work[0]] * args.num_warmups, work
    source, as_text = token_source(server, model, args.tokenizer), args.endpoint == "chat"
    shape = Shape(args.input_len, args.output_len, args.prefix_len, args.range_ratio)
    warm = random_work(args.num_warmups, shape, source, as_text, np.random.default_rng([args.seed, 1]))
    return warm, random_work(args.num_prompts, shape, source, as_text, rng)


async def _measure(
    args: argparse.Namespace,
    server: Server,
    model: str,
    warm: list[Work],
    work: list[Work],
    times: list[float],
    extra: dict[str, Any],
) -> Run:
    bodies = [request_body(each, args.endpoint, model, extra) for each in warm + work]
    before = await drive(server, args.endpoint, bodies[: len(warm)], [0.0] * len(warm), args.max_concurrency, False)
    errors = [result.error for result in before.results if result.error]
    if errors:
        raise CommandError(f"the warm-up request failed: {errors[0]}")
    return await drive(
        server, args.endpoint, bodies[len(warm) :], times, args.max_concurrency, progress=sys.stderr.isatty()
    )


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--percentiles {text!r}: expected numbers with commas between, such as 50,99") from None
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--percentiles {text!r}: a percentile is between 0 and 100")
    return values


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra_body)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-body: not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body: expected an object, not {args.extra_body}")
    return {**({"ignore_eos": True} if args.ignore_eos else {}), **extra}


def _print(figures: dict[str, Any], percentiles: list[float], args: argparse.Namespace) -> None:
    rate = f"{args.request_rate:g} requests/s" if math.isfinite(args.request_rate) else "all at once"
    limit = f", at most {args.max_concurrency} in flight" if args.max_concurrency else ""
    print(f"{args.num_prompts} requests, {rate}{limit}: {figures['completed']} completed, {figures['failed']} failed, "
          f"{figures['duration']:.2f} s")  # fmt: skip
    for title, key, unit in (
        ("input tokens", "total_input_tokens", ""),
        ("output tokens", "total_output_tokens", ""),
        ("request throughput", "request_throughput", " requests/s"),
        ("request goodput", "request_goodput", " requests/s"),
        ("output throughput", "output_throughput", " tokens/s"),
        ("total token throughput", "total_token_throughput", " tokens/s"),
    ):
        if key in figures:
            value = figures[key]
            print(
                f"  {title:<24}{value:>12,}{unit}" if isinstance(value, int) else f"  {title:<24}{value:>12,.2f}{unit}"
            )
    others = [p for p in percentiles if p != 50]  # the median has its column
    columns = ["mean", "median", *(f"p{p:g}" for p in others)]
    print(f"  {'milliseconds':<24}" + "".join(f"{column:>12}" for column in columns))
    for name in METRICS:
        keys = [f"mean_{name}_ms", f"median_{name}_ms", *(percentile_key(p, name) for p in others)]
        print(f"  {TITLES[name]:<24}" + "".join(f"{figures[key]:>12,.2f}" for key in keys))


def _write(args: argparse.Namespace, model: str, figures: dict[str, Any], done: Run) -> None:
    asked = {"num_prompts", "request_rate", "burstiness", "max_concurrency", "input_len", "output_len", "prefix_len",
             "range_ratio", "seed", "endpoint", "ignore_eos", "extra_body", "goodput"}  # fmt: skip
    settings = {name: value for name, value in vars(args).items() if name in asked}
    if math.isinf(args.request_rate):
        settings["request_rate"] = "inf"
    if math.isinf(args.burstiness):
        settings["burstiness"] = "inf"
    record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "url": args.url, "model": model, **settings}
    record.update(figures)
    if args.save_detailed:
        record["requests"] = [
            {"error": r.error} if r.error else
            {"ttft": r.ttft_s, "e2el": r.e2e_s, "itls": r.itls_s, "output_tokens": output_tokens(r),
             "input_tokens": r.num_prompt_tokens}
            for r in done.results
        ]  # fmt: skip
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {args.out}: {error.strerror}") from None


COMMAND = Command("measure any OpenAI-compatible server: throughput, latencies, goodput", add_arguments, run)
