"""Sends the requests of a benchmark at their times and collects what came back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from app.cli.bench.workload import Work
from app.cli.stream_client import Server, StreamResult, stream_completion

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Run:
    """Results in the order of the requests, and the seconds from the first arrival to the last completion."""

    results: list[StreamResult]
    duration_s: float


def request_body(work: Work, endpoint: str, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The HTTP body of one request."""
    if endpoint == "chat":
        messages = [{"role": "user", "content": work.prompt}]
        return {"model": model, "messages": messages, "max_completion_tokens": work.output_len, **extra}
    return {"model": model, "prompt": work.prompt, "max_tokens": work.output_len, **extra}


async def drive(
    server: Server,
    endpoint: str,
    bodies: Sequence[dict[str, Any]],
    times: Sequence[float],
    max_concurrency: int | None,
    progress: bool,
) -> Run:
    """Start each body at its time, at most `max_concurrency` at once; waiting for that is not part of the latency."""
    gate: contextlib.AbstractAsyncContextManager[Any]
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    with tqdm(total=len(bodies), unit="request", dynamic_ncols=True, disable=not progress) as bar:

        async def one(body: dict[str, Any]) -> StreamResult:
            async with gate:
                result = await stream_completion(server, body, PATHS[endpoint])
            bar.update(1)
            return result

        begin = time.perf_counter()
        tasks = []
        for body, at in zip(bodies, times, strict=True):
            delay = begin + at - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(body)))
        results = await asyncio.gather(*tasks)
        return Run(list(results), time.perf_counter() - begin)
