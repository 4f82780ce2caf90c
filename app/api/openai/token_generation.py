"""POST /inference/v1/generate: token ids in, token ids out, for routers and trainers that hold the text themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from fastapi import APIRouter, Request
from pydantic import Field, ValidationInfo, model_validator
from starlette.responses import Response

from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation import Generation, open_stream, response_headers
from app.api.chat.generation_body import GenerationBody
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.events import Collected, Event, collect
from app.api.generation.placement import PlacementFields
from app.api.generation.render import Prompt, find_model
from app.api.generation.sse import DONE, EventFormat, EventStreamResponse
from app.api.http.body import describe_body, read_body
from app.api.http.errors import in_words_of
from app.api.http.json_response import json_response, written
from app.api.http.strict_models import NO_FIELDS, StrictModel, sort_fields
from app.api.http.work_pool import work_of
from app.api.openai.logprobs import TokenIdNames, chat_position, prompt_logprobs, writing_cost_s
from app.bounds import TokenIds
from app.config.limits import RequestLimits
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs

_WORDS = {
    "prompt": "token_ids",
    **{name: f"sampling_params.{name}" for name in SamplingParams.model_fields},
}
_NAMES = TokenIdNames()


class TokenSampling(SamplingParams):
    """SamplingParams as engines of token ids are sent them."""

    refused: ClassVar[Mapping[str, str]] = NO_FIELDS
    ignored: ClassVar[Mapping[str, str]] = {"detokenize": "answers are token ids"}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any, info: ValidationInfo) -> Any:
        return sort_fields(cls, data, info)


class TokensRequest(PlacementFields, StrictModel):
    """Body of POST /inference/v1/generate."""

    refused: ClassVar[Mapping[str, str]] = {
        "features": "the model reads text only",
        "kv_transfer_params": "KV transfer is not supported yet",
        "output_mode": "answers are token ids; see /detokenize",
    }

    token_ids: TokenIds = Field(min_length=1, description="The prompt.")
    sampling_params: TokenSampling = Field(description="How tokens are chosen, and when the answer ends.")
    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    stream: bool = Field(False, description="Answer as server-sent events while tokens come.")
    request_id: str | None = Field(None, description="Echoed as x-request-id.", pattern=r"^[\x21-\x7e]{1,256}$")

    def to_body(self) -> TokensBody:
        """The same request as other routes state it."""
        own = {name: getattr(self.sampling_params, name) for name in self.sampling_params.model_fields_set}
        own |= self.placement_fields()
        names = ("model", "stream", "request_id")
        with in_words_of(_WORDS):
            return TokensBody.of({**own, **{name: getattr(self, name) for name in names}})


class TokensBody(GenerationBody):
    """A generation that was asked for by token ids; errors name the fields that the client knows."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """The body; ValidationError or InvalidRequestError when fields do not go together."""
        return cls.model_validate(dict(fields))

    def field_names(self) -> dict[str, str]:
        """The client's names of the fields, for errors."""
        return {**super().field_names(), **_WORDS}


def token_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The endpoint over `client`."""
    router = APIRouter(tags=["tokens"])

    @router.post("/inference/v1/generate", openapi_extra=describe_body(TokensRequest))
    async def generate_tokens(request: Request) -> Response:
        """Continue token ids by token ids; `stream` makes it server-sent events."""
        asked = await read_body(request, TokensRequest)
        body = asked.to_body()
        model = find_model(client, body.model)
        envelope = ResponseEnvelope.of("generate", model, body.model)
        prompts = [Prompt(asked.token_ids)]
        stream = open_stream(client, limits, request, body, envelope, Generation.of(body, model, prompts))
        request_id = request.state.request_id
        if body.stream:
            return EventStreamResponse(stream, TokenChunks(request_id, body.logprobs is not None))
        collected = await collect(stream)

        def answer() -> Response:
            fields: dict[str, Any] = {"request_id": request_id, "choices": [_choice(entry) for entry in collected]}
            scored = collected[0].prompt_logprobs
            fields["prompt_logprobs"] = None if scored is None else prompt_logprobs(scored, model.tokenizer)
            fields["kv_transfer_params"] = None
            return json_response(fields, response_headers(stream))

        return await work_of(request).run(writing_cost_s(collected), answer)

    return router


def _choice(entry: Collected) -> dict[str, Any]:
    output = entry.output
    return {
        "index": output.index,
        "logprobs": None if output.logprobs is None else _logprobs(output.logprobs, written),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids,
    }


def _logprobs(entries: Sequence[TokenLogprobs], write: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Logprobs as a chat has them; where no most likely tokens were asked for, the sampled one stands for them."""
    described = []
    for entry in entries:
        position = chat_position(entry, _NAMES)
        sampled = {name: value for name, value in position.items() if name != "top_logprobs"}
        described.append(write(position | {"top_logprobs": position["top_logprobs"] or [sampled]}))
    return {"content": described, "refusal": None}


class TokenChunks(EventFormat):
    """The stream: one event for each engine output, in the shape of the whole answer, then [DONE]."""

    def __init__(self, request_id: str, has_logprobs: bool) -> None:
        self._request_id = request_id
        self._has_logprobs = has_logprobs

    def start(self) -> str:
        """Nothing comes before the tokens."""
        return ""

    def event(self, event: Event) -> str:
        """The tokens of one engine output."""
        choice, delta = event
        logprobs: Sequence[Any] | None = delta.logprobs if self._has_logprobs else None
        described = {
            "index": choice.index,
            "logprobs": None if logprobs is None else _logprobs(logprobs, dict),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids,
        }
        return f"data: {json.dumps({'request_id': self._request_id, 'choices': [described]})}\n\n"

    def end(self) -> str:
        """The end of the stream."""
        return DONE


ENDPOINT = Endpoint(
    lambda api: token_routes(api.client, api.limits), (TokensRequest,), generating=("/inference/v1/generate",)
)
