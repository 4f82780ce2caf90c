"""POST /v1/completions: text or token-id prompts, one or many, with echo and prompt scoring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from app.api.chat.envelope import ResponseEnvelope, usage
from app.api.chat.generation import Generation, open_stream, response_headers
from app.api.chat.generation_body import REFUSED_EVERYWHERE, GenerationBody
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.events import Collected, collect
from app.api.generation.render import Prompt, check_total_chars, encode, find_model, prompt_room, truncate
from app.api.generation.sse import EventStreamResponse
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import json_response
from app.api.http.prompt_field import PromptField
from app.api.http.work_pool import ECHO_S_PER_TOKEN, work_of
from app.api.openai.chunks import CompletionChunks, OutputOptions
from app.api.openai.echo import Echo
from app.api.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs, token_names, writing_cost_s
from app.api.openai.ranking import best_choices
from app.bounds import Count
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError
from app.text.served_model import ServedModel


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions."""

    refused: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "suffix": "insertion is not supported",
        "prompt_embeds": "not supported yet",
    }

    prompt: PromptField = Field(description="A text, token ids, or a list of either.")
    max_tokens: Count | None = Field(16, ge=0, description="Most tokens to generate; 0 only with echo.")
    echo: bool = Field(False, description="Put the prompt before the completion.")
    best_of: Count | None = Field(
        None, ge=1, description="Make so many choices and answer with the n most likely; the width of a beam search."
    )
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens, mostly a bos.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"{self.best_of} is less than n={self.n}", param="best_of")
        if self.stream and self.best_of not in (None, self.n):
            raise UnsupportedError("what is best is known at the end: not with stream=true", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens=0 is only allowed with echo", param="max_tokens")
        return self

    @property
    def beam_width(self) -> int | None:
        """Beams of a search; None without one."""
        return (self.best_of or self.n) if self.use_beam_search else None

    @property
    def must_rank(self) -> bool:
        """True if more choices are made than are shown."""
        return not self.use_beam_search and self.best_of not in (None, self.n)

    def field_names(self) -> dict[str, str]:
        """The client's names of the fields, for errors."""
        return super().field_names() | ({"n": "best_of"} if self.best_of not in (None, self.n) else {})

    def sampling_fields(self) -> dict[str, Any]:
        """SamplingParams' fields; echo with logprobs scores the prompt, max_tokens=0 costs one unseen token."""
        fields = super().sampling_fields()
        if self.must_rank:
            fields |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        if self.echo and self.logprobs is not None:
            wanted = self.logprobs, self.prompt_logprobs or 0
            fields["prompt_logprobs"] = -1 if -1 in wanted else max(wanted)
        if self.max_tokens == 0:
            fields |= {"max_tokens": 1, "min_tokens": 0}
        return fields

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever form was sent."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


def completion_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The completions endpoint over `client`."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", openapi_extra=describe_body(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue each prompt; `stream` makes it server-sent events."""
        body = await read_body(request, CompletionRequest)
        model = find_model(client, body.model)
        work = work_of(request)
        prompts = await read_prompts(request, body, model, limits)
        envelope = ResponseEnvelope.of("cmpl", model, body.model)
        stream = open_stream(client, limits, request, body, envelope, Generation.of(body, model, prompts))
        num_echoed = sum(len(prompt.token_ids) for prompt in prompts) if body.echo else 0
        echoes = await work.run(ECHO_S_PER_TOKEN * num_echoed, _echoes, body, prompts, model)
        hides_output = body.max_tokens == 0
        if body.stream:
            has_logprobs = body.logprobs is not None
            options = OutputOptions(
                body.include_usage,
                body.continuous_usage,
                has_logprobs,
                body.return_token_ids,
                names_are_ids=body.return_tokens_as_token_ids,
            )
            form = CompletionChunks(envelope, stream.choices, model.tokenizer, options, echoes, hides_output)
            return EventStreamResponse(stream, form)
        collected = await collect(stream)
        shown = best_choices(collected, body.n) if body.must_rank else collected

        def answer() -> Response:
            fields = envelope.fields("text_completion")
            fields["choices"] = [_choice(entry, echoes, body, model) for entry in shown]
            fields |= {"usage": usage(stream.choices, not hides_output), "kv_transfer_params": None}
            return json_response(fields, response_headers(stream))

        return await work.run(writing_cost_s(shown), answer)

    return router


async def read_prompts(
    request: Request, body: CompletionRequest, model: ServedModel, limits: RequestLimits
) -> list[Prompt]:
    """The prompts of a body as token ids, within the server's limits."""
    given = body.prompts()
    if not given:
        raise InvalidRequestError("the list of prompts is empty", param="prompt")
    if len(given) > limits.max_prompts:
        raise InvalidRequestError(f"{len(given)} prompts; at most {limits.max_prompts}", param="prompt")
    room = prompt_room(model, "prompt", body.truncate_prompt_tokens, body.truncation_side, body.max_tokens)
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not texts:
        return [truncate(Prompt(prompt), room) for prompt in given if not isinstance(prompt, str)]
    check_total_chars(sum(map(len, texts)), limits, "prompt")
    token_ids = await encode(work_of(request), model.tokenizer, texts, body.add_special_tokens, room)
    return [truncate(Prompt(ids, text), room) for ids, text in zip(token_ids, texts, strict=True)]


def _echoes(body: CompletionRequest, prompts: list[Prompt], model: ServedModel) -> list[Echo]:
    """One Echo for each choice; [] without echo."""
    if not body.echo:
        return []
    echoes = [Echo.of(prompt, model.tokenizer) for prompt in prompts]
    return [echo for echo in echoes for _ in range(body.n)]


def _choice(entry: Collected, echoes: list[Echo], body: CompletionRequest, model: ServedModel) -> dict[str, Any]:
    output = entry.output
    echo = echoes[output.index] if echoes else None
    is_scored_only = body.max_tokens == 0
    names = token_names(model.tokenizer, body.return_tokens_as_token_ids)
    text = (echo.text if echo else "") + ("" if is_scored_only else output.text)
    choice: dict[str, Any] = {
        "index": output.index,
        "text": text,
        "logprobs": None if body.logprobs is None else _logprobs(entry, echo, is_scored_only, names),
        "finish_reason": "length" if is_scored_only else output.finish_reason,
        "stop_reason": None if is_scored_only else output.stop_reason,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    if body.prompt_logprobs is not None and entry.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(entry.prompt_logprobs, model.tokenizer)
    if body.return_token_ids:
        choice["token_ids"] = [] if is_scored_only else output.token_ids
        choice["prompt_token_ids"] = entry.choice.request.client_token_ids
    return choice


def _logprobs(entry: Collected, echo: Echo | None, is_scored_only: bool, names: TokenNames) -> dict[str, Any]:
    start = len(echo.text) if echo else 0
    offsets = [start + offset for offset in entry.text_offsets]
    own = completion_logprobs(entry.output.logprobs or (), entry.output.token_ids, offsets, names)
    if echo is None:
        return own
    prompt = echo.logprobs(entry.prompt_logprobs or (), names)
    return prompt if is_scored_only else {name: prompt[name] + own[name] for name in prompt}


ENDPOINT = Endpoint(
    lambda api: completion_routes(api.client, api.limits), (CompletionRequest,), generating=("/v1/completions",)
)
