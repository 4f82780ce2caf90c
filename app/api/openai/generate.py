"""POST /generate: a prompt and sampling parameters in one flat body, texts out, as the demonstration server of vLLM
had it. Each text begins with the prompt; a stream is a line of JSON for each engine output, with the texts so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation import Generation, open_stream, response_headers
from app.api.chat.generation_body import REFUSED_EVERYWHERE, GenerationBody
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.events import Event, collect
from app.api.generation.render import Prompt, check_total_chars, encode, find_model, prompt_room, truncate
from app.api.generation.sse import EventFormat, EventStreamResponse
from app.api.http.body import describe_body, read_body
from app.api.http.errors import error_body
from app.api.http.json_response import json_response
from app.api.http.work_pool import work_of
from app.bounds import Count, Text
from app.config.limits import RequestLimits
from app.errors import MantaError

_TEXT_ONLY = "the answer holds texts only; see /v1/completions"


class GenerateRequest(GenerationBody):
    """Body of POST /generate."""

    refused: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        **dict.fromkeys(("logprobs", "prompt_logprobs", "return_token_ids", "stream_options"), _TEXT_ONLY),
        **dict.fromkeys(("logprob_token_ids", "return_tokens_as_token_ids"), _TEXT_ONLY),
    }

    prompt: Text = Field(description="The text to continue.")
    stream: bool = Field(False, description="Answer as lines of JSON while tokens come, each with the texts so far.")
    max_tokens: Count | None = Field(16, ge=1, description="Most tokens to generate.")


def generate_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The endpoint over `client`."""
    router = APIRouter(tags=["plain"])

    @router.post("/generate", openapi_extra=describe_body(GenerateRequest))
    async def generate(request: Request) -> Response:
        """Continue a prompt: the texts with the prompt before them; `stream` makes it lines of JSON."""
        body = await read_body(request, GenerateRequest)
        model = find_model(client, body.model)
        check_total_chars(len(body.prompt), limits, "prompt")
        room = prompt_room(model, "prompt", body.truncate_prompt_tokens, body.truncation_side, body.max_tokens)
        (token_ids,) = await encode(work_of(request), model.tokenizer, [body.prompt], True, room)
        prompt = truncate(Prompt(token_ids, body.prompt), room)
        envelope = ResponseEnvelope.of("generate", model, body.model)
        generation = Generation.of(body, model, [prompt])
        stream = open_stream(client, limits, request, body, envelope, generation)
        if body.stream:
            return _LinesResponse(stream, TextLines(body.prompt, len(stream.choices)))
        texts = [body.prompt + entry.output.text for entry in await collect(stream)]
        return json_response({"text": texts}, response_headers(stream))

    return router


class TextLines(EventFormat):
    """A line for each engine output: `{"text": [...]}`, all of each choice's text so far."""

    def __init__(self, prompt: str, num_choices: int) -> None:
        self._texts = [prompt] * num_choices

    def start(self) -> str:
        """Nothing comes before the texts."""
        return ""

    def event(self, event: Event) -> str:
        """The texts after one engine output; "" where it brought none."""
        choice, delta = event
        if not delta.text and delta.finish_reason is None:
            return ""
        self._texts[choice.index] += delta.text
        return json.dumps({"text": self._texts}, ensure_ascii=False) + "\n"

    def end(self) -> str:
        """The stream ends with its last line."""
        return ""

    def error(self, error: MantaError) -> str:
        """The last line of a stream that broke."""
        return json.dumps(error_body(error), ensure_ascii=False) + "\n"

    def keep_alive(self) -> str:
        """An empty line."""
        return "\n"


class _LinesResponse(EventStreamResponse):
    media_type = "application/x-ndjson"


ENDPOINT = Endpoint(lambda api: generate_routes(api.client, api.limits), (GenerateRequest,), generating=("/generate",))
