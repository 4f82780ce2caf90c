"""POST /generative_scoring: how likely a generating model goes on with one of a few tokens after query and item."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from app.api.chat.envelope import ResponseEnvelope, usage
from app.api.chat.generation import Generation, open_stream, response_headers
from app.api.chat.generation_body import GenerationBody
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.events import Collected, collect
from app.api.generation.placement import PlacementFields
from app.api.generation.render import Prompt, check_total_chars, encode, find_model, must_generate, prompt_room
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import json_response
from app.api.http.strict_models import StrictModel
from app.api.http.work_pool import RequestWork, work_of
from app.bounds import MAX_TOKEN_IDS, Int64, Items, Text, TokenIds
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.records.sampling_params import MAX_LOGPROB_TOKEN_IDS
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel

JOIN_S_PER_TOKEN = 1e-8
_WORDS = {"prompt": "items", "logprob_token_ids": "label_token_ids", "n": "items"}
# One greedy step, whatever defaults a model has: its logprobs are those of the bare model.
_ONE_STEP: Mapping[str, Any] = {
    "max_tokens": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": 0,
}


def _is_list(value: Any) -> str:
    return "ids" if isinstance(value, list) else "text"


def _holds_lists(value: Any) -> str:
    return "ids" if isinstance(value, list) and value and isinstance(value[0], list) else "texts"


class GenerativeScoringRequest(PlacementFields, StrictModel):
    """Body of POST /generative_scoring."""

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    query: Annotated[
        Annotated[Text, Tag("text")] | Annotated[TokenIds, Tag("ids")],
        Discriminator(_is_list),
    ] = Field(description="What is asked of each item: a text, or token ids.")
    items: Annotated[
        Annotated[Items[Text], Tag("texts")] | Annotated[Items[TokenIds], Tag("ids")],
        Discriminator(_holds_lists),
    ] = Field(description="The items, each with a score: texts, or lists of token ids.")
    label_token_ids: list[Int64] = Field(
        min_length=1,
        max_length=MAX_LOGPROB_TOKEN_IDS,
        description="The tokens that are told apart; the score is the probability of the first.",
    )
    apply_softmax: bool = Field(
        True, description="Probabilities among the labels; false: among all tokens of the vocabulary."
    )
    item_first: bool = Field(False, description="The query follows the item.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens to the query, mostly a bos.")
    request_id: str | None = Field(None, description="Echoed as x-request-id.", pattern=r"^[\x21-\x7e]{1,256}$")

    def to_body(self) -> ScoringBody:
        """The same request as other routes state it."""
        own = {"model": self.model, "request_id": self.request_id, "logprob_token_ids": self.label_token_ids}
        return ScoringBody.model_validate({**_ONE_STEP, **own, **self.placement_fields()})

    def texts(self) -> list[str]:
        """All of its texts."""
        return [text for text in (self.query, *self.items) if isinstance(text, str)]


class ScoringBody(GenerationBody):
    """The step that scores an item; errors name the fields that the client knows."""

    def field_names(self) -> dict[str, str]:
        """The client's names of the fields, for errors."""
        return {**super().field_names(), **_WORDS}


def scoring_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The endpoint over `client`."""
    router = APIRouter(tags=["plain"])

    @router.post("/generative_scoring", openapi_extra=describe_body(GenerativeScoringRequest))
    async def score_by_generation(request: Request) -> Response:
        """Score items by the token that a generating model would go on with."""
        asked = await read_body(request, GenerativeScoringRequest)
        model = find_model(client, asked.model)
        must_generate(model)
        prompts = await _prompts(work_of(request), asked, model, limits)
        body = asked.to_body()
        envelope = ResponseEnvelope.of("generative-scoring", model, asked.model)
        generation = Generation.of(body, model, prompts)
        stream = open_stream(client, limits, request, body, envelope, generation)
        collected = await collect(stream)
        data = [{"index": i, "object": "score", "score": _score(entry, asked)} for i, entry in enumerate(collected)]
        head = {"id": envelope.id, "object": "list", "created": envelope.created, "model": envelope.model}
        return json_response(head | {"data": data, "usage": usage(stream.choices)}, response_headers(stream))

    return router


async def _prompts(
    work: RequestWork, asked: GenerativeScoringRequest, model: ServedModel, limits: RequestLimits
) -> list[Prompt]:
    """The query with each item: their tokens one behind the other, whatever a text of both would be cut into."""
    if not asked.items:
        raise InvalidRequestError("there is no item", param="items")
    if len(asked.items) > limits.max_prompts:
        raise InvalidRequestError(f"{len(asked.items)} items; at most {limits.max_prompts}", param="items")
    check_total_chars(sum(map(len, asked.texts())), limits, "items")
    (query,) = await _token_ids(work, model, [asked.query], asked.add_special_tokens, prompt_room(model, "query"))
    items = await _token_ids(work, model, asked.items, False, prompt_room(model, "items"))
    num_tokens = len(query) * len(items) + sum(map(len, items))
    if num_tokens > MAX_TOKEN_IDS:
        raise InvalidRequestError(f"{num_tokens} tokens in all prompts; at most {MAX_TOKEN_IDS}", param="items")

    def joined() -> list[Prompt]:
        return [Prompt(item + query if asked.item_first else query + item) for item in items]

    return await work.run(JOIN_S_PER_TOKEN * num_tokens, joined)


async def _token_ids(
    work: RequestWork,
    model: ServedModel,
    given: Sequence[str] | Sequence[list[int]] | Sequence[str | list[int]],
    add_special_tokens: bool,
    room: TextRoom,
) -> list[list[int]]:
    """Token ids of texts, or those that were given."""
    texts = [one for one in given if isinstance(one, str)]
    if texts:
        return await encode(work, model.tokenizer, texts, add_special_tokens, room)
    return [one for one in given if not isinstance(one, str)]


def _score(entry: Collected, asked: GenerativeScoringRequest) -> float:
    """The probability of the first label."""
    assert entry.output.logprobs, "one step, with the logprobs of the labels"
    told = entry.output.logprobs[0]
    logprobs = dict(zip(told.token_ids, told.logprobs, strict=True))
    return probability([logprobs[label] for label in dict.fromkeys(asked.label_token_ids)], asked.apply_softmax)


def probability(logprobs: Sequence[float], among_these: bool) -> float:
    """The probability of the first of some tokens, by their logprobs: of all the vocabulary's, or among these."""
    if not among_these:
        return math.exp(logprobs[0])
    highest = max(logprobs)
    if highest == -math.inf:
        return 0.0
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    return weights[0] / sum(weights)


ENDPOINT = Endpoint(lambda api: scoring_routes(api.client, api.limits), (GenerativeScoringRequest,))
