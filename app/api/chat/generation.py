"""The work that chat and completions do alike: from body and prompts to a running EventStream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request

from app.api.chat.beam_fields import beam_search_params
from app.api.chat.beam_search import BeamSearchClient
from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation_body import GenerationBody
from app.api.engine_client import EngineClient
from app.api.generation.answer_start import PLAIN, AnswerStart
from app.api.generation.events import Choice, EventStream
from app.api.generation.render import Prompt, engine_requests, must_generate, sampling_params
from app.config.limits import RequestLimits
from app.text.output_processor import OutputProcessor
from app.text.served_model import ServedModel

MAX_SESSION_CHARS = 256


@dataclass(slots=True, frozen=True)
class Generation:
    """Answers of a model to prompts, as a body asks for them."""

    model: ServedModel
    prompts: Sequence[Prompt]
    fields: dict[str, Any]  # sampling parameters that the body gives
    names: Mapping[str, str]  # what its dialect calls our fields, for errors
    start: AnswerStart = PLAIN

    @classmethod
    def of(cls, body: GenerationBody, model: ServedModel, prompts: Sequence[Prompt]) -> Self:
        """Those of a body that has no conversation."""
        return cls(model, prompts, body.sampling_fields(), body.field_names())


def open_stream(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    body: GenerationBody,
    envelope: ResponseEnvelope,
    generation: Generation,
) -> EventStream:
    """The stream of all choices of all prompts; raises InvalidRequestError or PromptTooLongError before it starts."""
    model, fields, shown = generation.model, generation.fields, generation.start.shown_token_ids
    must_generate(model)
    if body.request_id is not None:
        request.state.request_id = body.request_id
    seed = getattr(request.state, "seed", None)  # of a request that may come again
    if fields.get("seed") is None and seed is not None:
        fields = fields | {"seed": seed}
    params = sampling_params(fields, model, body.model_fields_set)
    requests = engine_requests(
        model,
        limits,
        generation.prompts,
        params,
        body.placement(request, _session(request, body), body.stream),
        request_id=envelope.id,
        names=generation.names,
        start=generation.start,
    )
    choices = [
        Choice(
            i,
            i // params.n,
            own,
            OutputProcessor(model.tokenizer, own.sampling, own.prompt_token_ids, shown),
        )
        for i, own in enumerate(requests)
    ]
    if body.use_beam_search:
        searches = [own.sampling for own in requests[:: params.n]]
        client = BeamSearchClient(client, beam_search_params(body, limits, searches))
    interval = body.stream_interval if body.stream else 1
    return EventStream(client, model.name, choices, request.receive, generation.names, interval)


def _session(request: Request, body: GenerationBody) -> str:
    """Returns the name by which the client says what belongs together: header `x-session-id`, `session_id`, or OpenAI's
    `prompt_cache_key`.
    """
    named = request.headers.get("x-session-id") or body.session_id or getattr(body, "prompt_cache_key", None) or ""
    return named[:MAX_SESSION_CHARS]


def response_headers(stream: EventStream) -> dict[str, str]:
    """Names the replica that answered, where it is known."""
    return {"X-Manta-Replica": stream.route.replica_id} if stream.route.replica_id else {}
