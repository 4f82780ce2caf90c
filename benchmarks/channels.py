"""The way from an ingress to an engine replica and back: Serve's handles against connections of its own, in one run.

    python -m benchmarks.channels [--requests 400] [--rounds 2]

Whole graphs, one for each way and measured in turns, over HTTP: an engine that only counts (a token a step of a
millisecond, no model), asked for one token of 1,024 prompt tokens and for streams of 64, and a BERT of one layer with
one text a body. Each line says latency (for streams: to the first token, and between tokens) and microseconds of CPU a
request of ingress, replica and all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from app.cli.stream_client import Server, run_streams
from benchmarks.embeddings import ENCODERS
from benchmarks.serve_process import ROOT, ServeProcess
from benchmarks.serving import TOKENIZER

QUICKSTART = ROOT / "configs/serve/quickstart.yaml"
TINY = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64, "num_hidden_layers": 1}
PROMPT = [300 + i % 500 for i in range(1024)]
TEXT = "the way to an engine and the way back again take their time"
PLACES = ("Ingress", "Engine")


def _scripted(config: dict[str, Any], channel: str) -> None:
    application = config["applications"][0]
    application["import_path"] = "tests.deployments.fake_app:build"
    application["runtime_env"]["env_vars"]["MANTA_FAKE_STEP_S"] = "0.001"
    application["args"] = {"models": [{"name": "m", "replica_cpus": 0.01}], "ingress": {"channel": channel}}


def _encoder(config: dict[str, Any], channel: str, folder: str) -> None:
    shape = {**ENCODERS["bert-base"], **TINY, "dtype": "float32"}
    (Path(folder) / "config.json").write_text(json.dumps(shape))
    engine = {
        "model": folder,
        "tokenizer": TOKENIZER,
        "load_format": "dummy",
        "runner": "pooling",
        "max_model_len": 512,
    }
    engine |= {"max_num_seqs": 64, "num_threads": 1, "enable_prefix_caching": False}
    config["applications"][0]["args"] = {"models": [{"name": "m", "engine": engine}], "ingress": {"channel": channel}}


class Clock:
    """CPU seconds of a server's processes, by what they are."""

    def __init__(self, server: ServeProcess) -> None:
        self._server = server

    def read(self) -> dict[str, float]:
        """Seconds so far."""
        found = dict.fromkeys((*PLACES, "all"), 0.0)
        for process in self._server.processes():
            try:
                times, title = process.cpu_times(), " ".join(process.cmdline())
            except psutil.Error:
                continue
            for place in (*(place for place in PLACES if f":{place}" in title), "all"):
                found[place] += times.user + times.system
        return found


async def _posted(url: str, bodies: list[dict[str, Any]], in_flight: int) -> list[float]:
    """Seconds that each answer took."""
    import aiohttp

    took: list[float] = []
    left = iter(bodies)

    async def client(session: aiohttp.ClientSession) -> None:
        for body in left:
            begin = time.perf_counter()
            async with session.post(url, json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
            took.append(time.perf_counter() - begin)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(in_flight)))
    return took


def _told(label: str, figures: dict[str, list[float]], used: dict[str, float], count: int, took_s: float) -> None:
    parts = [f"{label:34} {count / took_s:7.1f} requests/s"]
    for name, values in figures.items():
        ordered = sorted(values)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        parts.append(f"{name} p50 {1000 * statistics.median(ordered):.2f} p99 {1000 * p99:.2f} ms")
    cpu = ", ".join(f"{place.lower()} {seconds / count * 1e6:,.0f}" for place, seconds in used.items())
    print(f"{', '.join(parts)}; CPU us a request: {cpu}", flush=True)


def _measure(server: ServeProcess, label: str, path: str, bodies: list[dict[str, Any]], in_flight: int) -> None:
    clock, url = Clock(server), f"{server.base_url}{path}"
    asyncio.run(_posted(url, bodies[: max(in_flight, 20)], in_flight))
    before, begin = clock.read(), time.perf_counter()
    took = asyncio.run(_posted(url, bodies, in_flight))
    _report(label, {"latency": took}, clock, before, len(bodies), begin)


def _stream(server: ServeProcess, label: str, bodies: list[dict[str, Any]], in_flight: int) -> None:
    clock = Clock(server)
    before, begin = clock.read(), time.perf_counter()
    results = asyncio.run(run_streams(Server(server.base_url), bodies, in_flight))
    assert not [result.error for result in results if result.error]
    gaps = [b - a for one in results for a, b in zip(one.event_times, one.event_times[1:], strict=False)]
    _report(label, {"TTFT": [one.ttft_s for one in results], "ITL": gaps}, clock, before, len(bodies), begin)


def _report(
    label: str, figures: dict[str, list[float]], clock: Clock, before: dict[str, float], count: int, begin: float
) -> None:
    took_s = time.perf_counter() - begin
    used = {place: seconds - before[place] for place, seconds in clock.read().items()}
    _told(label, figures, used, count, took_s)


def _completions(count: int, num_tokens: int) -> list[dict[str, Any]]:
    return [
        {"model": "m", "prompt": [*PROMPT, 300 + i], "max_tokens": num_tokens, "ignore_eos": True} for i in range(count)
    ]


def _texts(count: int) -> list[dict[str, Any]]:
    return [{"model": "m", "input": f"{TEXT} {i}"} for i in range(count)]


def run(channels: Sequence[str], count: int, rounds: int) -> None:
    """Both graphs for each way, measured in turns: a machine is rarely as fast a minute later."""
    with contextlib.ExitStack() as stack:
        edits = {channel: partial(_scripted, channel=channel) for channel in channels}
        for channel, server in _in_turns(stack, edits, rounds):
            _measure(server, f"{channel}: one token, alone", "/v1/completions", _completions(count // 2, 1), 1)
            _measure(server, f"{channel}: one token, 64 in flight", "/v1/completions", _completions(2 * count, 1), 64)
            _stream(server, f"{channel}: 64 tokens, 32 in flight", _completions(count // 2, 64), 32)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        edits = {channel: partial(_encoder, channel=channel, folder=folder) for channel in channels}
        for channel, server in _in_turns(stack, edits, rounds):
            _measure(server, f"{channel}: a text, alone", "/v1/embeddings", _texts(count // 2), 1)
            _measure(server, f"{channel}: a text, 64 in flight", "/v1/embeddings", _texts(2 * count), 64)


def _in_turns(
    stack: contextlib.ExitStack, edits: Mapping[str, Callable[[dict[str, Any]], None]], rounds: int
) -> Iterator[tuple[str, ServeProcess]]:
    """Each way's server, all of them up; the next round the other way round."""
    servers = [
        (channel, stack.enter_context(ServeProcess(QUICKSTART, edit, ends_gracefully=False)))
        for channel, edit in edits.items()
    ]
    for number in range(rounds):
        yield from servers if number % 2 == 0 else reversed(servers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--channels", nargs="+", default=["serve", "direct"])
    options = parser.parse_args()
    run(options.channels, options.requests, options.rounds)
