"""The engine behind Ray Serve's own request routers, with nothing else of ours: what `prefix_routing` and
`adapter_routing` compare with.

`build({"engine": {...}, "num_replicas": 4, "request_router": "", "adapters": {}})`; a `request_router` is
"module:Class" of Serve's or Ray's. Adapters are Serve's multiplexed models: a request's `model` names one.
POST /v1/completions streams like ours, as far as the comparison reads it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.deployments.process.cluster_secret import load_block_hash_key
from app.deployments.replica.engine_factory import create_engine
from app.engine.async_engine import AsyncEngine
from app.records.adapter import AdapterAsk
from app.records.kv_events import KVEventLog
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.stats import RequestTimings, StepStats
from app.text.tokenizer import Tokenizer

MAX_ONGOING_REQUESTS = 1000
MOST_MODELS = 10  # adapters that a replica has loaded at a time

api = FastAPI()


@dataclass(slots=True)
class PromptRequest:
    """Has the attribute `prompt` that Ray's prefix router looks for in a call's arguments."""

    prompt: str
    prompt_token_ids: list[int]
    max_tokens: int


class _NoMetrics:
    def record_step(self, step: StepStats) -> None:
        """Nothing is recorded."""

    def record_finished(self, timings: RequestTimings) -> None:
        """Nothing is recorded."""

    def record_phases(self, schedule_s: float, wait_s: float, update_s: float) -> None:
        """Nobody asks."""


class _Adapter:
    """One that is loaded; Serve drops it when another one takes its place."""

    def __init__(self, engine: AsyncEngine, name: str, digest: str) -> None:
        self.ask = AdapterAsk(name, bytes.fromhex(digest))
        self._engine = engine

    def __del__(self) -> None:
        self._engine.control("unload_adapter", {"name": self.ask.name})


@serve.deployment
class PlainEngine:
    """One engine replica."""

    async def __init__(self, config: dict[str, Any], adapters: dict[str, str]) -> None:  # type: ignore[misc]
        self._adapters, self._num_loads = adapters, 0
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[EngineOutput]] = {}
        self._name = serve.get_replica_context().replica_id.unique_id
        events = KVEventLog(self._name, "0")
        engine_config = EngineConfig(**config)
        key = await asyncio.to_thread(load_block_hash_key)
        self._engine = create_engine(engine_config, key, self._post, self._on_fatal, _NoMetrics(), events)
        await asyncio.to_thread(self._engine.start)

    async def generate(self, request: PromptRequest) -> AsyncIterator[dict[str, Any]]:
        """(new tokens, cached tokens) of each step, as dicts."""
        request_id = uuid.uuid4().hex
        queue = self._queues[request_id] = asyncio.Queue()
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        asks = ((await self._adapter(serve.get_multiplexed_model_id())).ask,) if self._adapters else ()
        try:
            self._engine.add_request(EngineRequest(request_id, request.prompt_token_ids, params, asks=asks))
            while True:
                output = await queue.get()
                cached, tokens = output.num_cached_tokens, output.new_token_ids
                told = {"tokens": tokens, "cached": cached, "replica": self._name, "error": output.error}
                yield {**told, "num_loads": self._num_loads}
                if output.finish_reason is not None:
                    return
        finally:
            del self._queues[request_id]

    @serve.multiplexed(max_num_models_per_replica=MOST_MODELS)
    async def _adapter(self, name: str) -> _Adapter:
        """The adapter of this name, loaded."""
        self._num_loads += 1
        answer = self._engine.control("load_adapter", {"name": name, "path": self._adapters[name]})
        return _Adapter(self._engine, name, await asyncio.wrap_future(answer))

    def _post(self, outputs: list[EngineOutput]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if (queue := self._queues.get(output.request_id)) is not None:
                queue.put_nowait(output)

    def _on_fatal(self, error: BaseException) -> None:
        raise error


@serve.deployment
@serve.ingress(api)
class PlainIngress:
    """Tokenizes, and streams tokens as text."""

    def __init__(self, engine: Any, model: str, has_adapters: bool) -> None:
        self._engine, self._has_adapters = engine, has_adapters
        self._tokenizer = Tokenizer.from_directory(ModelInfo.from_directory(model).directory)

    @api.get("/health")
    async def health(self) -> dict[str, str]:
        """Answer whoever waits for the start."""
        return {"status": "ok"}

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> StreamingResponse:
        """A completion, streamed."""
        body = await request.json()
        ids = self._tokenizer.encode(body["prompt"])
        job = PromptRequest(body["prompt"], ids, body["max_tokens"])
        return StreamingResponse(self._stream(job, body["model"]), media_type="text/event-stream")

    async def _stream(self, job: PromptRequest, model: str) -> AsyncIterator[str]:
        cached, count, replica = 0, 0, ""
        named = {"multiplexed_model_id": model} if self._has_adapters else {}
        async for part in self._engine.options(stream=True, **named).generate.remote(job):
            cached, replica = max(cached, part["cached"]), part["replica"]
            if part["error"]:
                raise RuntimeError(part["error"])
            count += len(part["tokens"])
            text = self._tokenizer.decode(part["tokens"])
            told = {"choices": [{"text": text}], "replica": replica, "num_loads": part["num_loads"]}
            yield f"data: {json.dumps(told)}\n\n"
        usage = {
            "prompt_tokens": len(job.prompt_token_ids),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


def build(args: Mapping[str, Any]) -> serve.Application:
    """See the head of this file."""
    options: dict[str, Any] = {
        "num_replicas": args["num_replicas"],
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "ray_actor_options": {"num_cpus": 0},
    }
    if router := args.get("request_router"):
        module, _, name = router.partition(":")
        router_class = getattr(importlib.import_module(module), name)
        options["request_router_config"] = RequestRouterConfig(request_router_class=router_class)
    adapters = dict(args.get("adapters", {}))
    engine = PlainEngine.options(**options).bind(dict(args["engine"]), adapters)  # type: ignore[attr-defined]
    return PlainIngress.options(  # type: ignore[attr-defined]
        max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0}
    ).bind(engine, args["engine"]["model"], bool(adapters))
