"""`manta run-batch IN OUT`: a file of requests or prompts, through a server or without one."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tqdm import tqdm

from app.cli.batch.lines import Results, read_requests, seekable
from app.cli.batch.runner import Runner, Summary
from app.cli.batch.short_lines import LineReader
from app.cli.batch.transport import HttpTransport, Transport
from app.cli.command import Command
from app.cli.engine import ENGINE_OPTIONS, add_engine, offline_config
from app.cli.options import given
from app.cli.sampling import add_sampling, sampling_given
from app.cli.server_options import server_given
from app.errors import ConfigError

MAX_CONCURRENCY = 1024
QUIET_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files, where to send them, model and engine."""
    parser.add_argument(
        "input", metavar="IN.jsonl", type=Path, nargs="?",
        help="one request a line: custom_id, method, url, body, as OpenAI has it; or a text, or JSON with prompt or "
        "messages; a pipe may be given, and - is standard input",
    )  # fmt: skip
    parser.add_argument(
        "output", metavar="OUT.jsonl", type=Path, nargs="?",
        help="one result a line; requests whose results are there already are not sent again",
    )  # fmt: skip
    parser.add_argument("-i", "--input-file", type=Path, metavar="IN.jsonl", help="IN.jsonl, as vLLM has it")
    parser.add_argument("-o", "--output-file", type=Path, metavar="OUT.jsonl", help="OUT.jsonl, as vLLM has it")
    parser.add_argument("--url", help="send them to this server, instead of loading the model here")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: of the environment); with --url")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="at a time (default: %(default)s)")
    parser.add_argument(
        "--retries", type=int, default=10, metavar="N",
        help="attempts after the first while a server is full or away, then the run ends (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-failed", action="store_true", help="take failures out of OUT.jsonl, and send their requests again"
    )
    parser.add_argument("--chat", action="store_true", help="answer text lines as chat messages instead of completing")
    add_engine(parser)
    add_sampling(parser)
    parser.set_defaults(defaults={name: parser.get_default(name) for name in ("model", "chat_template")})


def run(args: argparse.Namespace) -> int:
    """Run the batch; 1 when any line's result is an error, of this run or one before. The output holds the reason."""
    if not 1 <= args.concurrency <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency: from 1 to {MAX_CONCURRENCY}")
    if args.retries < 0:
        raise ConfigError("--retries: at least 0")
    source_file, output = _files(args)
    reader = LineReader(args.chat, sampling_given(args))
    with seekable(source_file) as source:
        total = sum(1 for _ in read_requests(source, reader))  # before a model is loaded
        if not total:
            raise ConfigError(f"{source_file}: no requests")
        with Results.open(output, forget_failed=args.retry_failed) as results:
            is_done = all(results.has(line) for line in read_requests(source, reader))
            summary = _sum_up(source, reader, results) if is_done else _run(args, source, reader, results, total)
    before = f" ({summary.num_failed_before} of them failures: --retry-failed)" if summary.num_failed_before else ""
    print(
        f"{summary.num_done} done, {summary.num_failed} failed, {summary.num_skipped} had results{before}",
        file=sys.stderr,
    )
    return 1 if summary.num_failed or summary.num_failed_before else 0


def _files(args: argparse.Namespace) -> tuple[Path, Path]:
    """Both files, each by its place or by its option; ConfigError when one is missing, or there twice."""
    given = [path for path in (args.input, args.output) if path is not None]
    by_option = [path for path in (args.input_file, args.output_file) if path is not None]
    if len(given) + len(by_option) != 2:
        raise ConfigError("give IN.jsonl and OUT.jsonl, once each: as two words, or with -i and -o")
    source = args.input_file or given.pop(0)
    output = args.output_file or given.pop(0)
    if source.resolve() == output.resolve():
        raise ConfigError("OUT.jsonl is IN.jsonl")
    return source, output


def _sum_up(source: Path, reader: LineReader, results: Results) -> Summary:
    """The summary of a batch that has all its results."""
    failed = [results.failed(line) for line in read_requests(source, reader)]
    return Summary(num_skipped=len(failed), num_failed_before=sum(failed))


def _run(args: argparse.Namespace, source: Path, reader: LineReader, results: Results, total: int) -> Summary:
    transport = _transport(args)
    shown = sys.stderr.isatty()
    try:  # in a file, a line now and then, and none for a short run
        with tqdm(
            total=total, unit="request", mininterval=0.1 if shown else QUIET_S, delay=0.0 if shown else QUIET_S
        ) as bar:

            async def go() -> Summary:
                runner = Runner(transport, results, args.concurrency, args.retries, bar.update)
                return await runner.run(read_requests(source, reader))

            return asyncio.run(go())
    finally:
        transport.close()


def _transport(args: argparse.Namespace) -> Transport:
    if args.url is not None:
        mine = [option.flag for option in ENGINE_OPTIONS if option.path in given(args, ENGINE_OPTIONS)]
        for name in ("model", "chat_template"):
            if getattr(args, name) != args.defaults[name]:
                mine.append("--" + name.replace("_", "-"))
        if mine:
            raise ConfigError(f"{mine[0]} is the server's own matter: not with --url")
        return HttpTransport(server_given(args))
    if args.api_key is not None:
        raise ConfigError("--api-key is only for a server: give its --url")
    from app.cli.batch.local_engine import local_transport

    return local_transport(offline_config(args), args.chat_template)


COMMAND = Command("answer a file of requests or prompts", add_arguments, run)
