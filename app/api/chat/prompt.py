"""A conversation as a prompt: limits, the chat template, tokens."""

from __future__ import annotations

import json
from typing import Any

from app.api.chat.messages import ChatOptions
from app.api.engine_client import ServedModel
from app.api.render import Prompt, check_total_chars, encode
from app.api.request_size import size_of
from app.api.work_pool import TOKENISE_S_PER_CHAR, RequestWork
from app.config import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError
from app.text.prompt_size import TextRoom
from app.text.template_sandbox import render_untrusted


async def render_chat(
    work: RequestWork, model: ServedModel, options: ChatOptions, limits: RequestLimits, room: TextRoom
) -> Prompt:
    """A conversation as one tokenised prompt, whole or what `room` keeps of it.

    InvalidRequestError names what exceeds a limit or cannot be rendered, PromptTooLongError what surely has more tokens
    than `room` takes.
    """
    num_chars = sum(message.num_chars for message in options.messages)
    check_total_chars(num_chars, limits, room.field)
    room.check(model.tokenizer, num_chars)
    text = await _render(work, model, options, limits)
    token_ids = await encode(work, model.tokenizer, [text], options.add_special_tokens, room)
    return Prompt(token_ids[0], text)


async def _render(work: RequestWork, model: ServedModel, options: ChatOptions, limits: RequestLimits) -> str:
    cost_s = TOKENISE_S_PER_CHAR * size_of(options)
    arguments = await work.run(cost_s, _template_arguments, model, options, limits)
    caps: dict[str, Any] = {"max_s": limits.max_template_s, "max_chars": limits.max_template_chars}
    if options.chat_template is not None:
        special = model.tokenizer.special_tokens
        return await work.run_process(render_untrusted, options.chat_template, special, arguments, **caps)
    return await work.run(cost_s, model.chat_template.render, **arguments, **caps)


def _template_arguments(model: ServedModel, options: ChatOptions, limits: RequestLimits) -> dict[str, Any]:
    check_conversation(options, limits)
    return {
        "messages": [message.for_template() for message in options.messages],
        "tools": [tool.for_template() for tool in options.tools or ()] or None,
        "documents": options.documents,
        # Continuing a message excludes opening a new turn, whatever the default of the other option says.
        "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
        "continue_final_message": options.continue_final_message,
        "chat_template_kwargs": options.template_names(),
    }


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
