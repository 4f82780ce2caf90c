"""Prompts of one body that travel to an engine as one request: one choice of a replica, one message, one answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest


@dataclass(slots=True, frozen=True)
class Bundle:
    """Says, among a request's `asks`, that its tokens are several prompts one behind the other, and where each ends.

    Whoever places, counts, refuses or moves the request has one; the engine that takes it in computes its parts as
    requests of their own, which share steps with all others and take turns with them.
    """

    lengths: tuple[int, ...]
    second_texts_at: tuple[int | None, ...]  # PoolingParams.second_text_at of each

    @property
    def num_prompts(self) -> int:
        """Requests that it stands for, where these are counted."""
        return len(self.lengths)


def bundled(requests: Sequence[EngineRequest]) -> EngineRequest:
    """One request for the results of several, which differ in their tokens and second texts alone."""
    first = requests[0]
    if len(requests) == 1:
        return first
    bundle = Bundle(tuple(len(one.prompt_token_ids) for one in requests), tuple(map(_second_text_at, requests)))
    tokens = [token for one in requests for token in one.prompt_token_ids]
    return replace(first, prompt_token_ids=tokens, asks=(*first.asks, bundle))


def parts_of(request: EngineRequest) -> list[EngineRequest]:
    """The requests that it stands for: itself, unless it is a bundle."""
    bundle = request.asked(Bundle)
    if bundle is None:
        return [request]
    asks = tuple(ask for ask in request.asks if ask is not bundle)
    return [
        replace(request, request_id=f"{request.request_id}#{i}", prompt_token_ids=tokens, work=work, asks=asks)
        for i, (tokens, work) in enumerate(_prompts(request, bundle))
    ]


def _prompts(request: EngineRequest, bundle: Bundle) -> Iterator[tuple[list[int], PoolingParams]]:
    begin, shared = 0, request.pooling
    assert shared is not None, "a bundle asks for results of prompts"
    for length, second_text_at in zip(bundle.lengths, bundle.second_texts_at, strict=True):
        same = second_text_at == shared.second_text_at
        work = shared if same else shared.model_copy(update={"second_text_at": second_text_at})
        yield request.prompt_token_ids[begin : begin + length], work
        begin += length


def _second_text_at(request: EngineRequest) -> int | None:
    return None if request.pooling is None else request.pooling.second_text_at
