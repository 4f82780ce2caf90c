"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import describe_body, read_body
from app.api.engine_client import EngineClient, ServedModel
from app.api.events import Collected, EventStream, collect
from app.api.openai.chunks import ChatChunks, StreamWishes, call_fields, chat_finish_reason
from app.api.openai.generation import open_stream, response_headers
from app.api.openai.head import ResponseHead, usage
from app.api.openai.logprobs import chat_logprobs, prompt_logprobs
from app.api.openai.messages import ChatOptions
from app.api.openai.protocol import ChatRequest
from app.api.parsers import TOOL_PARSERS, tool_parser_name
from app.api.parsers.base import ToolParser
from app.api.render import Prompt, encode, find_model, truncate
from app.api.sse import EventStreamResponse
from app.config import RequestLimits
from app.errors import UnsupportedError


def chat_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The chat endpoint over `client`."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", openapi_extra=describe_body(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation; `stream` makes it server-sent events."""
        body = await read_body(request, ChatRequest)
        model = find_model(client, body.model)
        parser = _tool_parser(body, model)
        prompt = truncate(await render_chat(model, body.chat_options()), body.truncate_prompt_tokens, model)
        head = ResponseHead.of("chatcmpl", model, body.model)
        fields = body.sampling_fields()
        if parser is not None and _hides(parser, model):
            fields["skip_special_tokens"] = False
        stream = open_stream(client, limits, request, body, model, [prompt], head, fields)
        parsers = [parser() for _ in stream.choices] if parser is not None else []
        max_calls = None if body.parallel_tool_calls else 1
        if body.stream:
            wishes = StreamWishes(body.include_usage, body.continuous_usage, body.logprobs, body.return_token_ids)
            form = ChatChunks(head, stream.choices, model.tokenizer, wishes, parsers, max_calls)
            return EventStreamResponse(stream, form)
        collected = await collect(stream)
        choices = [_choice(entry, parsers, max_calls, body, model) for entry in collected]
        answer = head.fields("chat.completion") | {"choices": choices, "usage": usage(stream.choices)}
        return JSONResponse(answer | _prompt_fields(stream, collected, body, model), headers=response_headers(stream))

    return router


async def render_chat(model: ServedModel, options: ChatOptions) -> Prompt:
    """A conversation as one tokenised prompt."""
    kwargs = options.chat_template_kwargs or {}
    if "reasoning_effort" in kwargs and "reasoning_effort" not in model.chat_template.source:
        raise UnsupportedError("this model's chat template does not use it", param="reasoning_effort")
    text = model.chat_template.render(
        [message.for_template() for message in options.messages],
        tools=[tool.for_template() for tool in options.tools or ()] or None,
        documents=options.documents,
        # Continuing a message excludes opening a new turn, whatever the default of the other option says.
        add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
        continue_final_message=options.continue_final_message,
        chat_template_kwargs=kwargs,
    )
    return Prompt(await encode(model.tokenizer, text, options.add_special_tokens), text)


def _tool_parser(body: ChatRequest, model: ServedModel) -> type[ToolParser] | None:
    """The parser for the answer: only when tools are offered and may be called."""
    if not body.tools or body.tool_choice == "none":
        return None
    name = tool_parser_name(model.chat_template.source)
    if name is None:
        raise UnsupportedError("the way this model calls tools is not known to the server", param="tools")
    return TOOL_PARSERS.load(name)


def _hides(parser: type[ToolParser], model: ServedModel) -> bool:
    """Whether skipping special tokens would hide the parser's markers."""
    special = model.tokenizer.special_token_ids
    return any(model.tokenizer.token_to_id(marker) in special for marker in parser.markers)


def _choice(
    entry: Collected, parsers: list[ToolParser], max_calls: int | None, body: ChatRequest, model: ServedModel
) -> dict[str, Any]:
    output = entry.output
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
    calls = []
    if parsers:
        first, rest = parsers[output.index].push(output.text), parsers[output.index].flush()
        calls = (first.calls + rest.calls)[:max_calls]
        message["content"] = first.content + rest.content
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [call_fields(call) for call in calls]
    choice: dict[str, Any] = {
        "index": output.index,
        "message": message,
        "logprobs": chat_logprobs(output.logprobs or (), model.tokenizer) if body.logprobs else None,
        "finish_reason": chat_finish_reason(output.finish_reason, len(calls)),
        "stop_reason": output.stop_reason,
    }
    return choice | ({"token_ids": output.token_ids} if body.return_token_ids else {})


def _prompt_fields(
    stream: EventStream, collected: list[Collected], body: ChatRequest, model: ServedModel
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    entries = collected[0].prompt_logprobs
    if body.prompt_logprobs is not None and entries is not None:
        fields["prompt_logprobs"] = prompt_logprobs(entries, model.tokenizer)
    if body.return_token_ids:
        fields["prompt_token_ids"] = stream.choices[0].request.prompt_token_ids
    return fields
