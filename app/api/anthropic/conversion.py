"""From Anthropic's words to those of a chat: messages, tools and options become a ChatRequest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.anthropic.documents import DocumentBlock, TextBlock
from app.api.anthropic.images import ImageBlock
from app.api.anthropic.protocol import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from app.api.chat.chat_request import ChatRequest
from app.api.chat.media_parts import content_of
from app.api.http.errors import in_words_of
from app.api.http.strict_models import IgnoredFields
from app.parsers.answer import load_reasoning_parser
from app.text.served_model import ServedModel

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_WORDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}


class MessagesChat(ChatRequest):
    """A chat that was asked for in Anthropic's words; errors name the fields that the client knows."""

    def field_names(self) -> dict[str, str]:
        """The client's names of the fields, for errors."""
        names = {**super().field_names(), **_WORDS}
        return {own: _WORDS.get(name, name) for own, name in names.items()}

    def asks_to_think(self, names: Mapping[str, Any]) -> bool:
        """Takes silence for a no, as Anthropic does."""
        return bool(super().asks_to_think(names))


def to_chat(body: CountTokensRequest, model: ServedModel) -> MessagesChat:
    """The same request as a chat. InvalidRequestError names what the model or the server cannot do."""
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.tools:
        fields["tools"] = [tool.for_chat() for tool in body.tools]
        fields |= _tool_choice(body)
    kwargs = {**_thinking(body.thinking, model), **(body.chat_template_kwargs or {})}
    if body.output_config is not None and body.output_config.effort is not None:
        # How much, not whether: `thinking` says that here, so the chat's reasoning_effort would say too much.
        kwargs = {"reasoning_effort": body.output_config.effort, **kwargs}
    if kwargs:
        fields["chat_template_kwargs"] = kwargs
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.messages[-1].role == "assistant":  # the answer continues what the client has begun
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesRequest):
        fields |= _sampling(body, model)
    with in_words_of(_WORDS):
        return MessagesChat.model_validate(fields)


def _sampling(body: MessagesRequest, model: ServedModel) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
    fields = {name: getattr(body, name) for name in names} | body.placement_fields()
    given = {name: value for name, value in fields.items() if value is not None}
    if body.service_tier == "standard_only":
        given["service_tier"] = "default"
    if body.thinking is not None and body.thinking.budget_tokens is not None and not ignored_fields(body, model):
        given["thinking_token_budget"] = body.thinking.budget_tokens
    return given | ({"stop": body.stop_sequences} if body.stop_sequences else {})


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for i, message in enumerate(body.messages):
        messages += _assistant(message) if message.role == "assistant" else _heard(message, f"messages.{i}")
    return messages


def _heard(message: Message, place: str) -> list[dict[str, Any]]:
    """A user's or system's turn: results of calls are messages of their own, in their order, then what was said."""
    blocks = [(f"{place}.content.{i}", block) for i, block in enumerate(message.blocks)]
    results = [_result(block, at) for at, block in blocks if isinstance(block, ToolResultBlock)]
    shown = [(at, block) for at, block in blocks if isinstance(block, TextBlock | DocumentBlock | ImageBlock)]
    said = [{"role": message.role, "content": _content(shown)}] if shown or not results else []
    return [*results, *said]


def _result(block: ToolResultBlock, place: str) -> dict[str, Any]:
    blocks = [TextBlock(type="text", text=block.content)] if isinstance(block.content, str) else block.content
    if block.is_error:  # chat templates have no place for it
        first, *rest = blocks or [TextBlock(type="text", text="")]
        blocks = [TextBlock(type="text", text=f"Error: {first.text}"), *([first] if not first.text else []), *rest]
    content = _content([(f"{place}.content.{i}", part) for i, part in enumerate(blocks)])
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _content(blocks: Sequence[tuple[str, TextBlock | DocumentBlock | ImageBlock]]) -> str | list[Any]:
    """Returns what was said, of blocks with their places in the body: one text, or parts where it has pictures."""
    return content_of(block.for_chat(place) if isinstance(block, ImageBlock) else block.text for place, block in blocks)


def _assistant(message: Message) -> list[dict[str, Any]]:
    blocks = message.blocks
    turn: dict[str, Any] = {"role": "assistant"}
    turn["content"] = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    if reasoning := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning"] = "".join(reasoning)
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    return [turn | ({"tool_calls": calls} if calls else {})]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _text(content: str | Sequence[TextBlock | DocumentBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool_choice(body: CountTokensRequest) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": named if choice.type == "tool" else _CHOICES[choice.type]}
    return fields | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


def ignored_fields(body: CountTokensRequest, model: ServedModel) -> IgnoredFields:
    """Counts what the body asks of a model that cannot do it, and that agents send whatever model they were given."""
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled" or load_reasoning_parser(model) is not None:
        return IgnoredFields()
    return IgnoredFields(["budget_tokens"] if _is_told(model) else ["thinking"])


def _thinking(thinking: Thinking | None, model: ServedModel) -> dict[str, Any]:
    """Returns what the model's chat template is told. One that is not told whether to think has a model that always
    does, or cannot."""
    if thinking is None or not _is_told(model):
        return {}
    return {"enable_thinking": thinking.type != "disabled"}


def _is_told(model: ServedModel) -> bool:
    return "enable_thinking" in model.chat_template.source
