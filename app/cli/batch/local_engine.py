"""The server's application over an engine in this process, without Ray: the same answers as from a server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path

from app.api.engine_client import RouteInfo
from app.api.generation.served_models import load_served_model
from app.api.http.auth import ApiKeys
from app.api.server.app import create_app
from app.cli.batch.transport import AsgiTransport
from app.config.engine import EngineConfig
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.config.media import MediaConfig
from app.config.model import ModelConfig
from app.errors import EngineDeadError
from app.media.reader import MediaReader
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest


class LocalEngine:
    """EngineClient over one AsyncEngine, served under the last part of its directory's name and as it was given. What
    prompts show is bounded by `media`."""

    def __init__(self, config: EngineConfig, chat_template: str | None, media: MediaConfig) -> None:
        from app.engine.async_engine import AsyncEngine
        from app.engine.core import EngineCore
        from app.engine.default_drafter import with_default_drafter
        from app.engine.executor import create_executor

        name = Path(config.model).name or config.model
        aliases = (config.model,) if config.model != name else ()
        key = secrets.token_bytes(32)
        self._reader = MediaReader(media, key)
        served = ModelConfig(name=name, aliases=aliases, engine=config, chat_template=chat_template)
        model = load_served_model(served, self._reader)
        self.models = dict.fromkeys((name, *aliases), model)
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[EngineOutput]]] = {}
        drafting = with_default_drafter(config, model.info)
        core = EngineCore(drafting, model.info, create_executor(drafting), key, given=config)
        self.engine = AsyncEngine(core, self._deliver, lambda error: None)
        self.engine.start()
        model.max_kv_tokens = core.bounds.max_kv_tokens

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            found = self._queues.get(output.request_id)
            if found is not None:
                loop, queue = found
                loop.call_soon_threadsafe(queue.put_nowait, output)

    async def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        """See EngineClient."""
        queue: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self._queues[request.request_id] = asyncio.get_running_loop(), queue
        finished = False
        try:
            self.engine.add_request(request)
            while not finished:
                output = await queue.get()
                finished = output.finish_reason is not None
                if output.finish_reason == "abort":
                    raise EngineDeadError("the engine is shutting down")
                yield output
        finally:
            del self._queues[request.request_id]
            if not finished:
                self.engine.abort([request.request_id])

    def shutdown(self) -> None:
        """End the engine, and the processes that decode."""
        self.engine.shutdown()
        self._reader.close()

    async def is_healthy(self) -> bool:
        """See EngineClient."""
        self.engine.check_health()
        return True

    async def metrics_text(self) -> str:
        """See EngineClient."""
        return ""


def local_transport(config: EngineConfig, chat_template: str | None) -> AsgiTransport:
    """Loads the model. CheckpointError and ConfigError are those of the engine."""
    ingress = IngressConfig()
    client = LocalEngine(config, chat_template, ingress.media)
    # Whoever runs this has the machine: no key is asked for, whatever the environment holds.
    app = create_app(client, RequestLimits(), ingress, ApiKeys())
    return AsgiTransport(app, client.engine.check_health, client.shutdown)
