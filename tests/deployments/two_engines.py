"""An ingress's half over real engines in this process: channels that break where a test says, and a dispatcher."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from app.api.engine_client import RouteInfo
from app.api.http.request_log import note_generation
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.config.ingress import IngressConfig
from app.deployments.channel.channel_client import ReplicaPort
from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.channel.direct_connection import Address
from app.deployments.channel.direct_port import DirectPort
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.replica_pool import ReplicaPool
from app.deployments.channel.wire import decode_control
from app.deployments.ingress.dispatcher import Dispatcher
from app.deployments.ingress.router_client import RouterClient
from app.deployments.router.prompt_hasher import PromptHasher
from app.engine.async_engine import AsyncEngine
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.errors import MantaError
from app.records.load_report import LoadReport
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.telemetry.metrics_recorder import MetricsRecorder
from app.text.chat_template import ChatTemplate
from app.text.served_model import ServedModel
from app.text.tokenizer import Tokenizer
from tests.deployments.over_tcp import SECRET, NoHandle, listen
from tests.limits import until

KEY = b"a secret for tests"
OPTIONS: dict[str, Any] = {"executor": "in_process", "num_blocks": 256, "num_threads": 1, "max_num_seqs": 16}


class NoRouter:
    """Requests are placed by load."""

    async def remote(self, questions: list[Any]) -> list[None]:
        return [None] * len(questions)


class Scissors:
    """Says behind which tokens a channel breaks: so many after the last cut, whoever brings them."""

    def __init__(self) -> None:
        self.cuts: list[int] = []

    def cut(self, num_tokens: int) -> bool:
        """So many tokens have come."""
        if not self.cuts or not num_tokens:
            return False
        self.cuts[0] -= num_tokens
        if self.cuts[0] > 0:
            return False
        del self.cuts[0]
        return True


class EngineBehindChannel:
    """ReplicaPort over an engine of its own, whose channel breaks where the scissors cut."""

    def __init__(self, name: str, scissors: Scissors, **options: Any) -> None:
        config = EngineConfig(model="tiny-chat", **{**OPTIONS, **options})
        info = ModelInfo.from_directory("tiny-chat")
        self.name = name
        self._scissors = scissors
        self.num_taken = 0  # requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = AsyncEngine(
            EngineCore(config, info, create_executor(config), KEY), self._deliver, lambda error: None
        )
        worker = self.engine.start()
        self.kv_tokens = worker.num_blocks * config.block_size
        self._report = LoadReport("tiny-chat", name, "1", True, 0, 0, 0, worker.num_blocks, config.block_size, 0)

    def open(self) -> None:
        """For the event loop that runs."""
        self._loop = asyncio.get_running_loop()
        self.hub = ChannelHub(self.engine, 64, 60.0)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[EngineOutput]) -> None:
        """Token by token, so that a cut may be behind any of them."""
        for output in outputs:
            self.hub.dispatch([output])
            if output.finish_reason is None and self._scissors.cut(len(output.new_token_ids)):
                for channel in list(self.hub.channels):
                    self.hub.drop(channel)

    async def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        channel = self.hub.open(channel_id, ingress_id)
        channel.send([], load=self._report)
        try:
            async with aclosing(channel.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self.hub.drop(channel)

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        return [await self._submit(channel_id, stream_id, request) for stream_id, request in requests]

    async def _submit(self, channel_id: str, stream_id: str, request: EngineRequest) -> MantaError | None:
        name = f"{request.request_id}/{channel_id}/{stream_id}"
        try:
            self.hub.add(channel_id, stream_id, name)
            await asyncio.to_thread(self.engine.add_request, dataclasses.replace(request, request_id=name))
        except MantaError as error:
            self.hub.remove(name)
            return error
        self.num_taken += 1
        return None

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        return self.hub.seclude(channel_id, stream_id)

    async def control(self, message: bytes) -> None:
        self.hub.control(decode_control(message))


class TwoEngines:
    """EngineClient over a dispatcher and replicas that lose their channels."""

    def __init__(self) -> None:
        info = ModelInfo.from_directory("tiny-chat")
        tokenizer = Tokenizer.from_directory(info.directory)
        self.scissors = Scissors()
        self.replicas = {
            "a": EngineBehindChannel("a", self.scissors),
            "b": EngineBehindChannel("b", self.scissors, max_num_batched_tokens=64),
        }
        template = ChatTemplate.from_directory(info.directory, tokenizer)
        kv_tokens = self.replicas["a"].kv_tokens
        served = ServedModel("tiny-chat", info, tokenizer, template, info.max_position_embeddings, kv_tokens)
        self.models = {"tiny-chat": served}
        self.is_over_tcp = False  # each channel has a connection of its own
        self._addresses: dict[str, Address] = {}

    async def start(self) -> None:
        """On the event loop that runs; ends with `stop`."""
        for replica in self.replicas.values():
            replica.open()
            if self.is_over_tcp:
                _, self._addresses[replica.name] = await listen(replica, replica.name)
        self.recorder = MetricsRecorder({"ingress": "i"}, scope="ingress")
        self.pool = ReplicaPool("tiny-chat", "i", IngressConfig(), self._discover, self._connect)
        router = RouterClient(NoRouter(), PromptHasher(KEY), 5.0)
        self.dispatcher = Dispatcher(self.pool, router, self.recorder, num_replicas=2)
        self.pool.finder.start()
        await until(lambda: len(self.pool.live()) == 2)

    def _connect(self, name: str) -> ReplicaPort:
        if not self.is_over_tcp:
            return self.replicas[name]
        return DirectPort(self._addresses[name], SECRET, name, NoHandle())

    async def stop(self) -> None:
        """Close the channels."""
        await self.pool.close()

    def shutdown(self) -> None:
        """Stop the engines."""
        for replica in self.replicas.values():
            replica.engine.shutdown()

    async def _discover(self) -> Discovery:
        return Discovery(frozenset(self.replicas), complete=True)

    async def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncIterator[EngineOutput]:
        route = route or RouteInfo()
        route.record = note_generation(model, request)  # as the ingress does
        async with aclosing(self.dispatcher.outputs(request, route)) as outputs:
            async for output in outputs:
                yield output

    async def is_healthy(self) -> bool:
        return True

    async def metrics_text(self) -> str:
        return ""
