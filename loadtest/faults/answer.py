"""What a client gets of one answer, put together from its events in the words of each dialect.

How a text is cut into chunks depends on time, so answers are compared by what they add up to. All but an answer's ends
grows, so a broken answer must be a beginning of the whole one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadtest.faults.mix import MESSAGES, RESPONSES, Ask

# Names and times, and what depends on the cache: different in every answer.
_OF_ONE_ANSWER = {"id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at", "signature"}
_OF_THE_CACHE = {"prompt_tokens_details", "input_tokens_details"}
_LEFT_OUT = _OF_ONE_ANSWER | _OF_THE_CACHE


@dataclass(slots=True)
class Answer:
    """`faults` are against the dialect itself: an end that came twice, numbers out of order."""

    texts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    ends: dict[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    error: str | None = None
    faults: list[str] = field(default_factory=list)

    def size(self) -> int:
        """How much has come: characters and items."""
        return sum(map(len, self.texts.values())) + sum(map(len, self.lists.values()))

    def add_text(self, name: str, text: str | None) -> None:
        """Append to a text."""
        if text:
            self.texts[name] = self.texts.get(name, "") + text

    def add_items(self, name: str, items: list[Any] | None) -> None:
        """Append to a list."""
        if items:
            self.lists.setdefault(name, []).extend(without_names(items))

    def end(self, name: str, value: Any) -> None:
        """What comes once."""
        if value is None:
            return
        if name in self.ends:
            self.faults.append(f"{name} came twice")
        self.ends[name] = without_names(value)


class AnswerReader(Protocol):
    """Fills an Answer from the data of its events, in their order."""

    def push(self, answer: Answer, data: str) -> None:
        """Take one event's data; ValueError, LookupError or TypeError when it is none of this dialect."""


def reader_of(ask: Ask) -> AnswerReader:
    """The reader of a request's answer."""
    if not ask.body.get("stream"):
        return _Collected()
    if ask.path == RESPONSES:
        return _Responses()
    return _Messages() if ask.path == MESSAGES else _Choices()


def without_names(value: Any) -> Any:
    """`value` without what is different in each answer."""
    if isinstance(value, dict):
        return {name: without_names(part) for name, part in value.items() if name not in _LEFT_OUT}
    return [without_names(part) for part in value] if isinstance(value, list) else value


class _Collected:
    """One JSON object."""

    def push(self, answer: Answer, data: str) -> None:
        answer.end("body", json.loads(data))
        answer.is_whole = True


class _Choices:
    """Chat, completions and token ids: chunks of choices, then `[DONE]`."""

    def push(self, answer: Answer, data: str) -> None:
        if answer.is_whole:
            answer.faults.append("an event after [DONE]")
        if data == "[DONE]":
            answer.is_whole = answer.error is None
            return
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = chunk["error"]["message"]
            return
        answer.end("usage", chunk.get("usage"))
        for choice in chunk["choices"]:
            self._take(answer, choice, choice["index"])

    def _take(self, answer: Answer, choice: dict[str, Any], index: int) -> None:
        delta = choice.get("delta") or choice
        for name in ("content", "reasoning", "reasoning_content", "text"):
            answer.add_text(f"{index} {name}", delta.get(name))
        for call in delta.get("tool_calls") or []:
            for name in ("name", "arguments"):
                answer.add_text(f"{index} call {call['index']} {name}", call["function"].get(name))
        for name in ("token_ids", "prompt_token_ids"):
            answer.add_items(f"{index} {name}", choice.get(name))
        for name, items in (choice.get("logprobs") or {}).items():
            answer.add_items(f"{index} logprobs {name}", items)
        for name in ("finish_reason", "stop_reason"):
            answer.end(f"{index} {name}", choice.get(name))


class _Responses:
    """OpenAI's Responses: numbered events, the whole response with the last."""

    def __init__(self) -> None:
        self._num_events = 0

    def push(self, answer: Answer, data: str) -> None:
        event = json.loads(data)
        kind = event["type"]
        if kind in ("error", "response.failed"):
            answer.error = event.get("message") or event["response"]["error"]["message"]
            return
        if event["sequence_number"] != self._num_events:
            answer.faults.append(f"event {event['sequence_number']} where {self._num_events} was due")
        self._num_events += 1
        if kind.endswith(".delta"):
            name = f"{kind} {event.get('output_index')} {event.get('content_index')}"
            answer.add_text(name, event["delta"])
            answer.add_items(f"{name} logprobs", event.get("logprobs"))
        elif kind in ("response.completed", "response.incomplete"):
            answer.end("response", event["response"])
            answer.is_whole = True


class _Messages:
    """Anthropic's Messages: blocks that open, grow and close."""

    def push(self, answer: Answer, data: str) -> None:
        event = json.loads(data)
        kind = event["type"]
        if kind == "error":
            answer.error = event["error"]["message"]
        elif kind == "content_block_start":
            answer.end(f"block {event['index']}", event["content_block"])
        elif kind == "content_block_delta":
            delta = event["delta"]
            for name in ("text", "thinking", "partial_json"):
                answer.add_text(f"block {event['index']} {name}", delta.get(name))
        elif kind == "message_delta":
            answer.end("stop", event["delta"])
            answer.end("output_tokens", event["usage"]["output_tokens"])  # the others are without what is cached
        elif kind == "message_stop":
            answer.is_whole = True
