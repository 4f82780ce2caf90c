"""From a conversation to a running answer: the way that chat completions, Anthropic's messages and responses share.

Each dialect states its request as a ChatRequest; what comes back is an EventStream and, for each choice, what reads
its text. So templates, tools, reasoning and limits are dealt with in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from app.api.chat.chat_request import ChatRequest
from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation import Generation, open_stream
from app.api.chat.prompt import render_chat
from app.api.engine_client import EngineClient
from app.api.generation.answer_start import AnswerStart
from app.api.generation.events import EventStream
from app.api.generation.render import must_generate, prompt_room, truncate
from app.api.http.errors import in_words_of
from app.api.http.work_pool import work_of
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.parsers.answer import AnswerParser, ParserPlan, load_tool_parser, plan_parsers
from app.text.served_model import ServedModel

PLAN_S_PER_BYTE = 1e-7  # schemas of tools become grammars


@dataclass(slots=True)
class Conversation:
    """A request under way: its choices' stream, and a parser for each choice where there is something to find."""

    model: ServedModel
    envelope: ResponseEnvelope
    stream: EventStream
    plan: ParserPlan
    parsers: list[AnswerParser]  # empty where all text is content


@dataclass(slots=True, frozen=True)
class Prepared:
    """A request before it runs: prompt and parameters, and what will be found in the answers' texts."""

    generation: Generation
    plan: ParserPlan


async def open_conversation(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    body: ChatRequest,
    model: ServedModel,
    envelope: ResponseEnvelope,
) -> Conversation:
    """Render, tokenise and check `body`; InvalidRequestError names the field at fault. Nothing runs yet."""
    prepared = await prepare(limits, request, body, model)
    plan = prepared.plan
    stream = open_stream(client, limits, request, body, envelope, prepared.generation)
    parsers = [] if plan.is_plain else [plan.new_parser() for _ in stream.choices]
    return Conversation(model, envelope, stream, plan, parsers)


async def prepare(limits: RequestLimits, request: Request, body: ChatRequest, model: ServedModel) -> Prepared:
    """Render, tokenise and check `body`; InvalidRequestError names the field at fault."""
    must_generate(model)  # before its template, which it may not have, refuses the conversation
    tool_options = body.tool_options()
    if tool_options is not None:
        load_tool_parser(model)  # before the template refuses the tools in words of its own
    fields = body.sampling_fields()
    room = prompt_room(model, "messages", body.truncate_prompt_tokens, body.truncation_side, fields["max_tokens"])
    work, options, names = work_of(request), body.chat_options(), body.field_names()
    with in_words_of(names):
        prompt = truncate(await render_chat(work, model, options, limits, room), room)
    answer = fields.get("structured_outputs")
    cost_s = PLAN_S_PER_BYTE * request.state.num_body_bytes if tool_options is not None else 0.0
    wanted = model, prompt.token_ids, tool_options
    thinks = body.asks_to_think(options.template_names())
    said: dict[str, Any] = {"continued": body.continued_text(), "answer": answer, "thinks": thinks}
    plan = await work.run(cost_s, plan_parsers, *wanted, **said)
    if plan.structured_outputs is not None:
        if body.structured_outputs is not None and tool_options is not None and tool_options.mode == "required":
            raise InvalidRequestError("excludes a tool_choice that requires a call", param="structured_outputs")
        fields["structured_outputs"] = plan.structured_outputs
    before = plan.reasoning_span if fields.get("structured_outputs") is not None else None
    start = AnswerStart(plan.shown_token_ids, before, plan.inside)
    return Prepared(Generation(model, [prompt], fields, names, start), plan)
