"""A conversation as a prompt: limits, the chat template, tokens."""

from __future__ import annotations

import json
import math
from typing import Any

from app.api.chat.media import read_media
from app.api.chat.messages import ChatOptions
from app.api.generation.render import Prompt, check_total_chars, encode
from app.api.http.work_pool import INLINE_S, TOKENISE_S_PER_CHAR, RequestWork, size_of
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError
from app.text.chat_template import RenderLimits, StuckTemplateError
from app.text.placeholders import Placeholders, encode_pieces, with_media
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel
from app.text.template_sandbox import render_untrusted

STUCK_S = 50 * INLINE_S  # CPU time after which a template that was taken for little work leaves the event loop


async def render_chat(
    work: RequestWork, model: ServedModel, options: ChatOptions, limits: RequestLimits, room: TextRoom
) -> Prompt:
    """A conversation as one tokenised prompt, whole or what `room` keeps of it.

    InvalidRequestError names what exceeds a limit or cannot be rendered, PromptTooLongError what surely has more tokens
    than `room` takes.
    """
    num_chars = sum([message.num_chars for message in options.messages])
    check_total_chars(num_chars, limits, room.field)
    room.check(model.tokenizer, num_chars)
    asked = [one for i, message in enumerate(options.messages) for one in message.media(f"messages.{i}")]
    shown = await read_media(work, model, asked, limits, room) if asked else []
    if model.media is None:
        text = await _render(work, model, options, limits)
        check_roles(options, text)
        token_ids = await encode(work, model.tokenizer, [text], options.add_special_tokens, room)
        return Prompt(token_ids[0], text)
    places = Placeholders(model.media, shown)
    rendered = await _render(work, model, options, limits, places)
    text = places.shown(rendered)
    check_roles(options, text)
    pieces = places.pieces(rendered)
    if len(pieces) == 1 and not shown:
        (ids,) = await encode(work, model.tokenizer, pieces, options.add_special_tokens, room)
    else:
        cost_s, special = TOKENISE_S_PER_CHAR * len(text), options.add_special_tokens
        ids = await work.run(cost_s, encode_pieces, model.tokenizer, pieces, special, room)
    ids, asks = with_media(model.media, ids, shown, room.field)
    return Prompt(ids, text, asks)


def check_roles(options: ChatOptions, prompt: str) -> None:
    """UnsupportedError where a message with a role of its own is not in the prompt: many templates pass it over."""
    for i, message in enumerate(options.messages):
        if message.has_own_role and message.text().strip() not in prompt:
            raise UnsupportedError(
                f"the chat template shows no messages of role {message.role!r}", param=f"messages.{i}.role"
            )


async def _render(
    work: RequestWork,
    model: ServedModel,
    options: ChatOptions,
    limits: RequestLimits,
    places: Placeholders | None = None,
) -> str:
    cost_s = TOKENISE_S_PER_CHAR * size_of(options)
    arguments = await work.run(cost_s, _template_arguments, options, limits, places)
    max_s, max_chars = limits.max_template_s, limits.max_template_chars
    template, source = model.chat_template, options.chat_template
    if source is None and not template.is_confined:
        caps = RenderLimits(max_s, STUCK_S if cost_s <= INLINE_S else math.inf, max_chars)
        try:
            return await work.run(cost_s, template.render, **arguments, limits=caps)
        except StuckTemplateError:  # it would hold up everybody
            pass
    source = source or template.source_for(has_tools=bool(arguments["tools"]))
    special = model.tokenizer.special_tokens
    return await work.run_process(render_untrusted, source, special, arguments, max_s, max_chars)


def _template_arguments(
    options: ChatOptions, limits: RequestLimits, places: Placeholders | None = None
) -> dict[str, Any]:
    check_conversation(options, limits)
    messages = [message.for_template() for message in options.messages]
    arguments = {
        "tools": [tool.for_template() for tool in options.tools] if options.tools else None,
        "documents": options.documents,
        # Continuing a message excludes opening a new turn, whatever the default of the other option says.
        "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
        "continue_final_message": options.continue_final_message,
        "chat_template_kwargs": options.template_names(),
    }
    if places is None:
        return {"messages": messages, **arguments}
    return {"messages": places.messages(messages), **{name: places.hide(value) for name, value in arguments.items()}}


def check_conversation(options: ChatOptions, limits: RequestLimits) -> None:
    """Refuse what exceeds the server's limits for one conversation."""
    if len(options.messages) > limits.max_messages:
        raise InvalidRequestError(f"{len(options.messages)} messages; at most {limits.max_messages}", param="messages")
    tools = options.tools or []
    if len(tools) > limits.max_tools:
        raise InvalidRequestError(f"{len(tools)} tools; at most {limits.max_tools}", param="tools")
    num_bytes = sum(len(json.dumps(tool.model_dump(exclude_none=True))) for tool in tools)
    if num_bytes > limits.max_tools_bytes:
        raise InvalidRequestError(f"tools of {num_bytes} bytes; at most {limits.max_tools_bytes}", param="tools")
    if options.chat_template is not None and not limits.trust_request_chat_template:
        raise UnsupportedError(
            "a request may not bring its own template, unless the server is configured so", param="chat_template"
        )
