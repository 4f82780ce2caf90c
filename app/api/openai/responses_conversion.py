"""From the words of /v1/responses to those of a chat: items, tools and options become a ChatRequest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.chat.chat_request import ChatRequest
from app.api.http.errors import in_words_of
from app.api.openai.responses_calls import call_forms, choice_for_chat
from app.api.openai.responses_items import (
    CallItem,
    CompactionItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResultItem,
    content_for_chat,
    part_of,
    text_of,
)
from app.api.openai.responses_protocol import ResponsesRequest
from app.api.openai.responses_tools import NamespaceTool

_SAID_OTHERWISE = frozenset({"tools", "tool_choice", "top_logprobs", "stream_options"})
_SAME = (ChatRequest.model_fields.keys() & ResponsesRequest.model_fields.keys()) - _SAID_OTHERWISE
_TOLD = ("system", "developer")
_SUMMED_UP = "This is a summary of our conversation so far:"
_WORDS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}


class ResponsesChat(ChatRequest):
    """A chat that was asked for in the words of /v1/responses; errors name the fields that the client knows."""

    def field_names(self) -> dict[str, str]:
        """The client's names of the fields, for errors."""
        names = {**super().field_names(), **_WORDS}
        return {own: _WORDS.get(name, name) for own, name in names.items()}


def to_chat(body: ResponsesRequest, items: Sequence[InputItem], num_dropped: int = 0) -> ResponsesChat:
    """The same request as a chat over `items`, the whole conversation; `num_dropped` turns are left out."""
    if body.forgets_reasoning:
        items = _without_earlier_reasoning(items)
    messages = _dropped(_messages(body.instructions, items, is_continued=bool(body.previous_response_id)), num_dropped)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME & body.model_fields_set}
    fields |= {"messages": messages, "max_tokens": body.max_output_tokens}
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.tools:
        shown = [tool.for_chat() if isinstance(tool, NamespaceTool) else [tool.for_chat()] for tool in body.tools]
        fields["tools"] = [each for tools in shown for each in tools]
        if body.tool_choice is not None:
            fields["tool_choice"] = choice_for_chat(body.tool_choice, call_forms(body.tools))
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        fields["response_format"] = _response_format(body.text.format.model_dump(by_alias=True, exclude_none=True))
    if body.text is not None and body.text.verbosity is not None:
        fields["verbosity"] = body.text.verbosity
    with in_words_of(_WORDS):
        return ResponsesChat.model_validate(fields)


def _without_earlier_reasoning(items: Sequence[InputItem]) -> list[InputItem]:
    asked = [i for i, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]
    last = asked[-1] if asked else 0
    return [item for i, item in enumerate(items) if i > last or not isinstance(item, ReasoningItem)]


def num_droppable(body: ResponsesRequest, items: Sequence[InputItem]) -> int:
    """Counts the oldest turns that may be left out: all but the instructions and the last."""
    messages = _messages(body.instructions, items)
    return max(0, len(messages) - 1 - (messages[0]["role"] in _TOLD))


def _dropped(messages: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    if not number:
        return messages
    start = int(messages[0]["role"] in _TOLD)
    kept = messages[start + number :]
    while len(kept) > 1 and kept[0]["role"] == "tool":  # a result without its call
        kept = kept[1:]
    return messages[:start] + kept


def _messages(instructions: str | None, items: Sequence[InputItem], is_continued: bool = False) -> list[dict[str, Any]]:
    """Messages of a conversation. What the assistant reasoned, said and called in a row is one message. Of one
    that `is_continued` some items came earlier, and errors name the input as a whole."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        place = "input" if is_continued else f"input.{i}"
        match item:
            case MessageItem(role="assistant"):
                turn = _assistant_turn(messages)
                turn["content"] += text_of(item.content)
            case MessageItem():
                _hear(messages, item.role, content_for_chat(item.content, part_of(place, "content")))
            case CompactionItem():
                _hear(messages, "user", f"{_SUMMED_UP}\n\n{item.summary}")
            case _ if isinstance(item, CallItem):
                turn = _assistant_turn(messages)
                if not item.is_cut:  # nobody ran one that is, and templates want arguments whole
                    turn.setdefault("tool_calls", []).append(item.for_chat())
            case _ if isinstance(item, ResultItem):
                messages.append(item.for_chat(place))
            case ReasoningItem():
                reasoning = "".join(part.text for part in item.content or item.summary)
                turn = _assistant_turn(messages)
                turn["reasoning"] = turn.get("reasoning", "") + reasoning
    return messages


def _assistant_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end; a new one when somebody else spoke last."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _hear(messages: list[dict[str, Any]], role: str, content: str | list[Any]) -> None:
    """Add a turn. What the model is told at the start is one message: many templates take no second one."""
    texts = isinstance(content, str) and all(isinstance(message["content"], str) for message in messages[:1])
    if len(messages) == 1 and messages[0]["role"] in _TOLD and role in _TOLD and texts:
        messages[0]["content"] += f"\n\n{content}"
    else:
        messages.append({"role": role, "content": content})


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form["type"] == "json_object":
        return {"type": "json_object"}
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
