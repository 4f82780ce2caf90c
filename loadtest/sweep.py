"""Runs Locust without its page at several load levels and writes one report.

    python -m loadtest.sweep --host http://127.0.0.1:8000 --users 1,4,16,64 --duration 30 --out results/loadtest
    python -m loadtest.sweep --serve configs/serve/quickstart.yaml --rates 1,2,4,8 --goodput ttft:300 tpot:50

`--users` is a closed loop (each user waits for an answer), `--rates` an open one (arrivals wait for nothing). DIR gets
`report.html`, `summary.json` and, for every level, Locust's own CSV files, its log and the answers as JSON lines.
The exit status is 1 when a request failed. A server that wants a key finds it in MANTA_API_KEY.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from loadtest.record import AnswerRecord
from loadtest.report import Level, SweepInfo, html_report
from loadtest.server import first_model
from loadtest.summary import Goals, summarize

ROOT = Path(__file__).resolve().parent.parent
DRAIN_S = 120  # time that the last requests of a level have to end
DEFAULT_GOODPUT = ("ttft:500", "tpot:100")


def build_parser() -> argparse.ArgumentParser:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--host", help="base URL of a running server")
    server.add_argument("--serve", type=Path, metavar="YAML", help="start this Serve configuration for the sweep")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--users", type=_counts, metavar="N,N,...", help="closed loop: numbers of users")
    load.add_argument("--rates", type=_numbers, metavar="R,R,...", help="open loop: requests per second")
    parser.add_argument("--kinds", default="", help="user classes of locustfile.py, comma-separated; all by default")
    parser.add_argument("--duration", type=_positive, default=30.0, help="seconds measured at each level")
    parser.add_argument("--warmup", type=_positive, default=5.0, help="seconds before them that do not count")
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=DEFAULT_GOODPUT,
        metavar="METRIC:MS",
        help="limits of a good request: ttft, tpot, e2e (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("results/loadtest"), metavar="DIR")
    parser.add_argument("--title", default="Load test")
    parser.add_argument("--locust", default="", metavar="OPTIONS", help="further options for Locust, in quotes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        goals = Goals.parse(args.goodput)
    except ValueError as error:
        parser.error(f"--goodput: {error}")
    args.out.mkdir(parents=True, exist_ok=True)
    began = f"{time.strftime('%Y-%m-%d %H:%M %Z')}, load average before it {os.getloadavg()[0]:.1f}"
    with _server(args.serve, args.host) as host:
        try:
            print(f"the server's first model is {first_model(host, os.environ.get('MANTA_API_KEY', ''))}", flush=True)
        except OSError as error:
            parser.error(f"--host: {error}")
        levels = [_run_level(args, host, load, goals) for load in args.users or args.rates]
    _write(args, goals, levels, began, argv)
    return 1 if any(level.summary.num_failed for level in levels) else 0


@contextlib.contextmanager
def _server(config: Path | None, host: str | None) -> Iterator[str]:
    """The base URL to load: the one given, or that of a server which lives as long as the sweep."""
    if config is None:
        assert host is not None
        yield host.rstrip("/")
        return
    from benchmarks.serve_process import ServeProcess

    print(f"starting {config} ...", flush=True)
    with ServeProcess(config) as server:
        print(f"ready at {server.base_url} after {server.start_time_s:.1f} s", flush=True)
        yield server.base_url


def _run_level(args: argparse.Namespace, host: str, load: float, goals: Goals) -> Level:
    """One run of Locust, summarized; RuntimeError with Locust's last words when it made no request."""
    stem = args.out / f"{'users' if args.users else 'rate'}-{load:g}"
    command = locust_command(args, host, load, stem)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    log = stem.with_name(stem.name + ".log")
    with log.open("wb") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    cores = cpu_s / (time.monotonic() - began)
    records = _read(stem.with_name(stem.name + ".jsonl"))
    if not records:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    summary = summarize(records, args.warmup, args.duration, goals)
    ttft = summary.latency["ttft"]
    print(
        f"{load:g} {_load_name(args)}: {summary.requests_per_s:.2f} req/s, {summary.output_tokens_per_s:,.0f} tok/s, "
        f"TTFT p50 {ttft.p50_ms:.0f} ms, p99 {ttft.p99_ms:.0f} ms, {summary.num_failed} failed",
        flush=True,
    )
    return Level(load, summary, cores)


def locust_command(args: argparse.Namespace, host: str, load: float, stem: Path) -> list[str]:
    """The command line of one level; its files begin with `stem`."""
    users = load if args.users else 1
    stem = stem.resolve()
    return [
        sys.executable, "-m", "locust", "--headless", "--only-summary", "--host", host,
        "-f", "loadtest/locustfile.py" if args.users else "loadtest/open_loop.py",
        "--users", f"{users:g}", "--spawn-rate", f"{max(1.0, users):g}",
        "--run-time", f"{args.warmup + args.duration + 1:.0f}s", "--stop-timeout", str(DRAIN_S),
        "--csv", str(stem), "--html", f"{stem}.html", "--records", f"{stem}.jsonl",
        *(["--rate", f"{load:g}"] if args.rates else []),
        *shlex.split(args.locust),
        *(kind for kind in args.kinds.split(",") if kind),
    ]  # fmt: skip


def _read(path: Path) -> list[AnswerRecord]:
    if not path.exists():
        return []
    return [AnswerRecord.from_json(line) for line in path.read_text().splitlines()]


def _write(
    args: argparse.Namespace, goals: Goals, levels: Sequence[Level], began: str, argv: Sequence[str] | None
) -> None:
    command = shlex.join(["python", "-m", "loadtest.sweep", *(sys.argv[1:] if argv is None else argv)])
    shared = "shared with the server" if args.serve else "of the client's machine"
    facts = {"Command": command, "When": began, "Where": f"{len(os.sched_getaffinity(0))} cores, {shared}"}
    wanted = ", ".join(f"{metric} within {limit:g} ms" for metric, limit in goals.limits_ms.items())
    info = SweepInfo(args.title, _load_name(args), wanted, facts)
    (args.out / "report.html").write_text(html_report(info, levels))
    summary = {**asdict(info), "goals_ms": goals.limits_ms, "levels": [asdict(level) for level in levels]}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"wrote {args.out / 'report.html'} and {args.out / 'summary.json'}")


def _load_name(args: argparse.Namespace) -> str:
    return "users" if args.users else "requests/s offered"


def _numbers(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _counts(text: str) -> list[float]:
    numbers = _numbers(text)
    if any(not number.is_integer() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} are not whole numbers")
    return numbers


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
