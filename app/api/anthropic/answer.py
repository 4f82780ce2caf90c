"""Answers in Anthropic's shapes: one message, or the events of its making."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json

from app.api.chat.blocks import BlockChange, BlockReader, ContentBlock
from app.api.generation.events import Choice, Event
from app.api.generation.sse import EventFormat
from app.api.http.errors import anthropic_error_body
from app.errors import MantaError
from app.text.output_processor import TextDelta


def new_message_id() -> str:
    """A new message id."""
    return f"msg_{uuid.uuid4().hex[:24]}"


def usage(choice: Choice) -> dict[str, Any]:
    """Tokens so far. As at Anthropic, `input_tokens` leaves out those that the prefix cache held."""
    cached = choice.processor.num_cached_tokens
    return {
        "input_tokens": choice.request.num_client_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": choice.processor.num_output_tokens,
    }


class Answer:
    """One answer: its message so far. `is_capped` says that the model's context, not the client, limits it."""

    def __init__(
        self,
        message_id: str,
        model: str,
        reader: BlockReader,
        new_call_id: Callable[[], str],
        is_capped: bool,
        shows_reasoning: bool,
    ) -> None:
        self.reader = reader
        self._new_call_id = new_call_id
        self._id = message_id
        self._model = model
        self._is_capped = is_capped
        self._shows_reasoning = shows_reasoning
        self._ids: dict[int, str] = {}

    def message(self, choice: Choice) -> dict[str, Any]:
        """The whole message."""
        content = [self.content(block, block.text) for block in self.reader.blocks if self.shows(block)]
        return self.head(choice) | {"content": content, **self.stop()}

    def head(self, choice: Choice) -> dict[str, Any]:
        """The message before anything was said."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(choice),
        }

    def stop(self) -> dict[str, Any]:
        """Stop reason and stop sequence."""
        delta = self.reader.finish
        assert delta is not None  # the stream has ended
        sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        return {"stop_reason": self._stop_reason(delta), "stop_sequence": sequence}

    def shows(self, block: ContentBlock) -> bool:
        """True if the client wants to see it."""
        return self._shows_reasoning or block.kind != "reasoning"

    def content(self, block: ContentBlock, text: str) -> dict[str, Any]:
        """`block` as a content block that holds `text`."""
        if block.kind == "text":
            return {"type": "text", "text": text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": signature(text) if text else ""}
        call_id = self._ids.setdefault(block.index, self._new_call_id().replace("call_", "toolu_", 1))
        return {"type": "tool_use", "id": call_id, "name": block.name, "input": _input(text)}

    def _stop_reason(self, delta: TextDelta) -> str:
        if delta.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_capped else "max_tokens"
        if isinstance(delta.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if self.reader.num_calls else "end_turn"


def signature(reasoning: str) -> str:
    """Returns what stands where Anthropic signs reasoning. It is not checked when it comes back."""
    return hashlib.blake2b(reasoning.encode(), digest_size=24).hexdigest()


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; as much of them as there is where the answer was cut short."""
    try:
        parsed = from_json(arguments, allow_partial="trailing-strings") if arguments.strip() else {}
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


class MessageEvents(EventFormat):
    """The stream of one message: message_start, blocks, message_delta, message_stop."""

    def __init__(self, answer: Answer, choice: Choice, request_id: str | None) -> None:
        self._answer = answer
        self._choice = choice
        self._request_id = request_id
        self._num_hidden = 0

    def start(self) -> str:
        """The message without content, and a ping."""
        head = self._answer.head(self._choice)
        return _event("message_start", message=head) + _event("ping")

    def event(self, event: Event) -> str:
        """Writes what one engine output changes in the blocks."""
        changes = self._answer.reader.read(event[1])
        return "".join(map(self._change, changes))

    def end(self) -> str:
        """Why it ended, what it took, and the end."""
        delta = self._answer.stop()
        return _event("message_delta", delta=delta, usage=usage(self._choice)) + _event("message_stop")

    def error(self, error: MantaError) -> str:
        """The end of a stream that broke."""
        body = anthropic_error_body(error.message, error.status, self._request_id)
        return f"event: error\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"

    def keep_alive(self) -> str:
        """A ping."""
        return _event("ping")

    def _change(self, change: BlockChange) -> str:
        block = change.block
        if not self._answer.shows(block):
            self._num_hidden += change.step == "open"
            return ""
        index = block.index - self._num_hidden
        if change.step == "open":
            return _event("content_block_start", index=index, content_block=self._answer.content(block, ""))
        if change.step == "grow":
            return _event("content_block_delta", index=index, delta=_delta(block, change.text))
        out = ""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": signature(block.text)}
            out = _event("content_block_delta", index=index, delta=delta)
        return out + _event("content_block_stop", index=index)


def _delta(block: ContentBlock, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _event(name: str, /, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, ensure_ascii=False)}\n\n"
