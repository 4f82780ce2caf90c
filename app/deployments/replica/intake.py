"""Brings requests into an engine beside the event loop: what takes milliseconds runs in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from app.config.media import MediaConfig
from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.replica.engine_factory import ReplicaEngine
from app.deployments.replica.grammar_queue import GrammarQueue
from app.deployments.replica.kept_pixels import KeptPixels
from app.deployments.replica.media_room import MediaRoom
from app.errors import MantaError
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.structured.structured_outputs import StructuredOutputs

LONG_PROMPT_TOKENS = 8192  # to check and hash more prompt tokens takes milliseconds: not on the event loop


class Intake:
    """One replica's, which has the memory for pixels that `media` says. `on_added` hears of each request that the
    engine has taken."""

    def __init__(
        self, engine: ReplicaEngine, hub: ChannelHub, on_added: Callable[[], None], media: MediaConfig
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._media = MediaRoom(media.engine_bytes, hub.has)
        self._pixels = KeptPixels(media.cache_bytes)
        self._on_added = on_added
        self._grammar_work = GrammarQueue()
        self._adding: set[asyncio.Future[Any]] = set()  # requests on their way into the engine

    @property
    def num_waiting_grammars(self) -> int:
        """Requests whose grammars wait to be compiled."""
        return self._grammar_work.num_waiting

    async def add(self, taken: list[EngineRequest | MantaError]) -> list[MantaError | None]:
        """Hands requests, whose streams are open, to the engine; returns why not, for each.

        They are seen through, also when the call that brought them is cancelled.
        """
        if all(isinstance(one, MantaError) or _grammar_of(one) is None for one in taken) and not _are_long(taken):
            return [one if isinstance(one, MantaError) else self._add_at_once(one) for one in taken]
        adding = asyncio.ensure_future(self._add_all(taken))
        self._adding.add(adding)
        adding.add_done_callback(self._adding.discard)
        return await asyncio.shield(adding)

    async def wait_settled(self) -> None:
        """Wait until nothing is on its way."""
        if self._adding:
            await asyncio.wait(self._adding)

    async def _add_all(self, taken: list[EngineRequest | MantaError]) -> list[MantaError | None]:
        is_long, began = _are_long(taken), time.monotonic()
        return [one if isinstance(one, MantaError) else await self._add(one, is_long, began) for one in taken]

    async def _add(self, request: EngineRequest, is_long: bool, began: float) -> MantaError | None:
        grammar = _grammar_of(request)
        if grammar is None and not is_long:
            return self._add_at_once(request)
        try:
            request = self._with_pixels(request)
            if grammar is None or self._engine.knows_grammar(grammar):
                await asyncio.to_thread(self._engine.add_request, request)
            else:
                await self._grammar_work.run(
                    request.placement.tenant,
                    lambda: self._compile_and_add(request),
                    lambda: self._engine.abort([request.request_id]),
                    time.monotonic() - began,
                )
        except MantaError as error:
            return self._refuse(request, error)
        self._see_added(request)
        return None

    def _add_at_once(self, request: EngineRequest) -> MantaError | None:
        """One whose check takes microseconds: a turn of the event loop may take longer on a busy engine."""
        try:
            self._engine.add_request(self._with_pixels(request))
        except MantaError as error:
            return self._refuse(request, error)
        self._see_added(request)
        return None

    def _with_pixels(self, request: EngineRequest) -> EngineRequest:
        request = self._pixels.whole(request)
        self._media.take(request)
        self._pixels.keep(request)
        return request

    def _refuse(self, request: EngineRequest, error: MantaError) -> MantaError:
        self._hub.remove(request.request_id)
        return error

    def _see_added(self, request: EngineRequest) -> None:
        if not self._hub.has(request.request_id):  # aborted before the engine knew of it
            self._engine.abort([request.request_id])
        self._on_added()

    def _compile_and_add(self, request: EngineRequest) -> None:
        """Runs in a thread, when it is the tenant's turn; its client may have left by then."""
        if self._hub.has(request.request_id):
            self._engine.add_request(request)


def _are_long(taken: list[EngineRequest | MantaError]) -> bool:
    return sum(one.num_known_tokens for one in taken if isinstance(one, EngineRequest)) > LONG_PROMPT_TOKENS


def _grammar_of(request: EngineRequest) -> StructuredOutputs | None:
    work = request.work
    return work.structured_outputs if isinstance(work, SamplingParams) else None
