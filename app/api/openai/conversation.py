"""From a conversation to a running answer: the way that chat completions, Anthropic's messages and responses share.

Each dialect states its request as a ChatRequest; what comes back is an EventStream and, for each choice, what reads
its text. So templates, tools, reasoning and limits are dealt with in one place.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from app.api.engine_client import EngineClient, ServedModel
from app.api.events import EventStream
from app.api.openai.generation import open_stream
from app.api.openai.head import ResponseHead
from app.api.openai.messages import ChatOptions
from app.api.openai.protocol import ChatRequest
from app.api.parsers import TOOL_PARSERS, tool_parser_name
from app.api.parsers.base import ToolParser
from app.api.render import Prompt, encode, truncate
from app.config import RequestLimits
from app.errors import UnsupportedError


@dataclass(slots=True)
class Conversation:
    """A request under way: its choices' stream, and a parser for each choice where there is something to find."""

    model: ServedModel
    head: ResponseHead
    stream: EventStream
    parsers: list[ToolParser]
    max_calls: int | None  # calls of one answer that are shown


async def open_conversation(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    body: ChatRequest,
    model: ServedModel,
    head: ResponseHead,
) -> Conversation:
    """Render, tokenise and check `body`; InvalidRequestError names the field at fault. Nothing runs yet."""
    parser = _tool_parser(body, model)
    prompt = truncate(await render_chat(model, body.chat_options()), body.truncate_prompt_tokens, model)
    fields = body.sampling_fields()
    if parser is not None and _hides(parser, model):
        fields["skip_special_tokens"] = False
    stream = open_stream(client, limits, request, body, model, [prompt], head, fields)
    parsers = [parser() for _ in stream.choices] if parser is not None else []
    return Conversation(model, head, stream, parsers, None if body.parallel_tool_calls else 1)


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
