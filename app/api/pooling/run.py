"""From prompts to their results: requests of many prompts each, some at once, in the order of the prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from app.api.engine_client import EngineClient, RouteInfo
from app.api.generation.request_builder import pooling_request
from app.api.http.errors import ClientDisconnected
from app.api.pooling.protocol import PooledBody
from app.errors import EngineDeadError, MantaError
from app.records.bundle import bundled
from app.records.outputs import PooledResult
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.text.pooling_prompt import PoolingPrompt
from app.text.served_model import ServedModel

INPUT: Mapping[str, str] = {"prompt": "input"}
# Most of one bundle: what shares its way costs each text little, and fairness and replicas want pieces.
MAX_BUNDLE_PROMPTS, MAX_BUNDLE_TOKENS = 256, 8192


async def pool(
    client: EngineClient,
    request: Request,
    body: PooledBody,
    model: ServedModel,
    prompts: Sequence[PoolingPrompt],
    params: PoolingParams,
    *,
    request_id: str,
    names: Mapping[str, str] = INPUT,
) -> list[PooledResult]:
    """A result for each prompt. `names` says what the dialect calls fields of ours.

    Raises InvalidRequestError, PromptTooLongError and UnsupportedError before anything runs, then what the engine
    raises; ClientDisconnected when nobody waits any more. In each case, what still runs is aborted.
    """
    if body.request_id is not None:
        request.state.request_id = body.request_id
    placement = body.placement(request)
    requests = [
        pooling_request(model, f"{request_id}-{i}", prompt, params, placement, names=names)
        for i, prompt in enumerate(prompts)
    ]
    found = await _gather(client, request, model, _bundles(model, requests))
    return [
        result if prompt.kept is None else PooledResult.of(prompt.counted(result.array()))
        for result, prompt in zip(found, prompts, strict=True)
    ]


def _bundles(model: ServedModel, requests: list[EngineRequest]) -> list[EngineRequest]:
    """The same in few requests, each of what an engine computes in a step or two, so that replicas share a body.

    One that brings something of its own, as a picture, goes alone.
    """
    most = min(MAX_BUNDLE_PROMPTS, max(1, model.max_running_of_prompt // 2))
    bundles: list[list[EngineRequest]] = [[]]
    num_tokens = 0
    for one in requests:
        own, is_alone = len(one.prompt_token_ids), any(ask is not model.adapter for ask in one.asks)
        is_full = is_alone or len(bundles[-1]) == most or num_tokens + own > MAX_BUNDLE_TOKENS
        if bundles[-1] and (is_full or _skipped(bundles[-1][0]) != _skipped(one)):
            bundles.append([])
            num_tokens = 0
        bundles[-1].append(one)
        num_tokens += MAX_BUNDLE_TOKENS if is_alone else own
    return [bundled(bundle) for bundle in bundles]


def _skipped(request: EngineRequest) -> int | None:
    """Tokens that count for nothing: the same of all prompts of a bundle."""
    return None if request.pooling is None else request.pooling.num_skipped


async def _gather(
    client: EngineClient, request: Request, model: ServedModel, requests: list[EngineRequest]
) -> list[PooledResult]:
    """Run all, as many at a time as leave room to others; the first failure ends what is left."""
    waiting = deque(requests)
    running: dict[asyncio.Task[list[PooledResult]], int] = {}  # with their numbers of prompts
    tasks: list[asyncio.Task[list[PooledResult]]] = []
    watcher = asyncio.create_task(_watch_client(request))
    try:
        while waiting or running:
            while waiting and (not running or sum(running.values()) + waiting[0].num_prompts <= model.max_running):
                one = waiting.popleft()
                tasks.append(asyncio.create_task(_run(client, model, one)))
                running[tasks[-1]] = one.num_prompts
            pending: set[asyncio.Task[Any]] = {*running, watcher}
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what it raised
            running = {task: number for task, number in running.items() if task not in done}
        return [result for task in tasks for result in task.result()]
    finally:
        for task in (*tasks, watcher):
            task.cancel()
        await asyncio.gather(*tasks, watcher, return_exceptions=True)


async def _run(client: EngineClient, model: ServedModel, request: EngineRequest) -> list[PooledResult]:
    outputs = client.generate(model.name, request, RouteInfo())
    try:
        async for output in outputs:
            if output.finish_reason == "error":
                raise output.as_error()
            if output.bundled is not None:
                return output.bundled
            if output.pooled is not None:
                return [output.pooled]
        raise EngineDeadError("the engine ended the request without a result")
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            with contextlib.suppress(MantaError):
                await close()


async def _watch_client(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnected
