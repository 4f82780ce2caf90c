"""Engines of several pooling models in this process behind one EngineClient, and a generating model without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from app.api.engine_client import RouteInfo
from app.api.generation.served_models import load_served_model
from app.config.model import ModelConfig
from app.engine.async_engine import AsyncEngine
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.media.reader import MediaReader
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.text.served_model import ServedModel
from tests.limits import wait_until

OPTIONS: dict[str, Any] = {"executor": "in_process", "num_threads": 1, "device": "cpu", "max_num_seqs": 16}


class PoolingEngines:
    """`directories` by the name under which a model is served."""

    def __init__(self, directories: dict[str, Path | str], reader: MediaReader | None = None, **options: Any) -> None:
        self.models: dict[str, ServedModel] = {}
        self.engines: dict[str, AsyncEngine] = {}
        self.requests: list[EngineRequest] = []
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[EngineOutput]]] = {}
        for name, directory in directories.items():
            config = ModelConfig.model_validate(
                {"name": name, "engine": {**OPTIONS, **options, "model": str(directory)}}
            )
            self.models[name] = load_served_model(config, reader)
            if self.models[name].pooling is None:
                continue
            core = EngineCore(config.engine, self.models[name].info, create_executor(config.engine), b"for tests")
            self.engines[name] = AsyncEngine(core, self._deliver, lambda error: None)
            worker = self.engines[name].start()
            self.models[name].max_kv_tokens = worker.num_blocks * config.engine.block_size

    def shutdown(self) -> None:
        for engine in self.engines.values():
            engine.shutdown()

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            loop, queue = self._queues[output.request_id]
            loop.call_soon_threadsafe(queue.put_nowait, output)

    async def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncIterator[EngineOutput]:
        self.requests.append(request)
        queue: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self._queues[request.request_id] = (asyncio.get_running_loop(), queue)
        self.engines[model].add_request(request)
        finished = False
        try:
            while not finished:
                output = await queue.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                self.engines[model].abort([request.request_id])

    def wait_idle(self) -> None:
        """Until no engine has a request any more."""
        engines = self.engines.values()
        wait_until(lambda: not any(s.num_running + s.num_waiting for s in (e.stats() for e in engines)), "no request")

    async def is_healthy(self) -> bool:
        return True

    async def metrics_text(self) -> str:
        return ""
