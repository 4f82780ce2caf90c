"""Beam search behind the same API as sampling: an EngineClient whose choices are the best beams of their prompt.

The choices of one prompt share one search. Each step of it is a request of one token for every beam; all run on the
replica that the first one was sent to, where the prefix cache holds what they share. When the last choice leaves, what
still runs is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from app.api.engine_client import EngineClient, RouteInfo
from app.beams.search import BeamSearch, BeamSearchParams, as_output
from app.errors import EngineDeadError, MantaError
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from app.text.served_model import ServedModel


@dataclass(slots=True)
class _Found:
    """Holds what a search brought for all its choices."""

    search: BeamSearch
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class _Shared:
    """One prompt's search, and how many choices wait for it."""

    task: asyncio.Task[_Found]
    num_waiting: int = field(default=0)


class BeamSearchClient:
    """EngineClient of one HTTP request: choice i of a prompt is its i-th best beam, in one output."""

    def __init__(self, client: EngineClient, params: BeamSearchParams) -> None:
        self.models = client.models
        self._client = client
        self._params = params
        self._searches: dict[str, _Shared] = {}  # by the part of the request id that the choices of a prompt share

    async def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        """The beam that belongs to `request.choice_index`, once the search has ended; see EngineClient."""
        prompt_id = request.request_id.rpartition("-")[0]
        shared = self._searches.get(prompt_id)
        if shared is None:
            task = asyncio.create_task(self._search(model, request, route or RouteInfo()))
            shared = self._searches[prompt_id] = _Shared(task)
        shared.num_waiting += 1
        try:
            found = await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if not shared.num_waiting and not shared.task.done():
                shared.task.cancel()
                with contextlib.suppress(asyncio.CancelledError, MantaError):
                    await shared.task
        beam = found.search.finished[request.choice_index]
        output = as_output(request.request_id, beam, found.search, self.models[model].info.eos_token_ids)
        output.num_cached_tokens = found.num_cached_tokens
        output.prompt_logprobs = found.prompt_logprobs
        yield output

    async def is_healthy(self) -> bool:
        """See EngineClient."""
        return await self._client.is_healthy()

    async def metrics_text(self) -> str:
        """See EngineClient."""
        return await self._client.metrics_text()

    async def _search(self, model: str, request: EngineRequest, route: RouteInfo) -> _Found:
        search = _begin(request, self._params, self.models[model])
        found = _Found(search)
        number = 0
        while requests := search.requests(request, number):
            outputs = await self._step(model, requests, route)
            if not number:
                found.num_cached_tokens = outputs[0].num_cached_tokens
                found.prompt_logprobs = outputs[0].prompt_logprobs
            number += len(requests)
            search.advance([(output.logprobs or [])[0] for output in outputs])
        return found

    async def _step(self, model: str, requests: list[EngineRequest], route: RouteInfo) -> list[EngineOutput]:
        """One token's output for each request, all at once; the others end when one fails."""
        # The response's own route is for one request at a time; the others share its place.
        routes = [route, *(RouteInfo(place=route.place) for _ in requests[1:])]
        tasks = [
            asyncio.create_task(self._one(self._client.generate(model, request, own)))
            for request, own in zip(requests, routes, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, outputs: AsyncIterator[EngineOutput]) -> EngineOutput:
        """The output of a request for one token. MantaError when the engine failed on it."""
        scored: EngineOutput | None = None
        prompt_logprobs = None
        try:
            async for output in outputs:
                prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                if output.finish_reason == "error":
                    raise output.as_error()
                if output.logprobs:
                    scored = output
                if output.finish_reason is not None:
                    break
        finally:
            close = getattr(outputs, "aclose", None)
            if close is not None:
                await close()
        if scored is None:
            raise EngineDeadError("the engine ended the request without a token")
        scored.prompt_logprobs = prompt_logprobs
        return scored


def _begin(request: EngineRequest, params: BeamSearchParams, model: ServedModel) -> BeamSearch:
    own: SamplingParams = request.sampling
    assert own.max_tokens is not None, "the API layer has set it"
    ends = frozenset(own.stop_token_ids) | frozenset(() if own.ignore_eos else model.info.eos_token_ids)
    params = params.model_copy(update={"min_tokens": own.min_tokens, "ignore_eos": own.ignore_eos})
    return BeamSearch(
        request.prompt_token_ids, params, ends, own.max_tokens, model.info.vocab_size, num_shown=own.logprobs or 0
    )
