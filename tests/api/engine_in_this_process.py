"""An engine behind the API in one process; needs no more than what a plain install has (tools/request_path.py)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

from app.api.engine_client import RouteInfo
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.text.chat_template import ChatTemplate
from app.text.served_model import ServedModel
from app.text.tokenizer import Tokenizer

OPTIONS: dict[str, Any] = {"executor": "in_process", "num_blocks": 256, "num_threads": 1, "max_num_seqs": 16}


class EngineInThisProcess:
    """EngineClient over one AsyncEngine."""

    def __init__(self, model: str = "tiny-chat", **options: Any) -> None:
        config = EngineConfig(model=model, **{**OPTIONS, **options})
        info = ModelInfo.from_directory(model)
        tokenizer = Tokenizer.from_directory(info.directory)
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[EngineOutput]]] = {}
        core = EngineCore(config, info, create_executor(config), secrets.token_bytes(32))
        self.engine = AsyncEngine(core, self._deliver, lambda error: None)
        worker = self.engine.start()
        template = ChatTemplate.from_directory(info.directory, tokenizer)
        tokens = worker.num_blocks * config.block_size
        length = info.max_position_embeddings
        self.models = {model: ServedModel(model, info, tokenizer, template, length, tokens)}

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            loop, queue = self._queues[output.request_id]
            loop.call_soon_threadsafe(queue.put_nowait, output)

    async def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncIterator[EngineOutput]:
        queue: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self._queues[request.request_id] = (asyncio.get_running_loop(), queue)
        self.engine.add_request(request)
        finished = False
        try:
            while not finished:
                output = await queue.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                self.engine.abort([request.request_id])

    async def is_healthy(self) -> bool:
        self.engine.check_health()
        return True

    async def metrics_text(self) -> str:
        return ""
