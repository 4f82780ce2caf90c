"""Answers of /v1/responses: the response object, and the events of its making with their sequence numbers."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from app.api.chat.blocks import BlockChange, BlockReader, ContentBlock
from app.api.generation.events import Choice, Event
from app.api.generation.sse import EventFormat
from app.api.http.service_terms import tier_of
from app.api.openai.logprobs import TokenNames, chat_logprobs
from app.api.openai.responses_calls import CallForm, FunctionForm, call_forms
from app.api.openai.responses_protocol import ResponsesRequest
from app.errors import MantaError
from app.records.request import EngineRequest

_PREFIXES = {"text": "msg", "reasoning": "rs"}


def new_id(prefix: str) -> str:
    """An id for a response or one of its items."""
    return f"{prefix}_{uuid.uuid4().hex}"


def item_id(prefix: str, response_id: str, index: int) -> str:
    """An item's id, in which the response's is found again (`response_of`)."""
    return f"{prefix}_{response_id.partition('_')[2]}{index:04x}"


def response_of(item_id: str) -> str | None:
    """The id of the response that an item belongs to; None where it is no id of ours."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found.group(1)}"


def event_text(event: str, number: int, /, **fields: Any) -> str:
    """One event of a response's stream, its sequence number within."""
    data = json.dumps({"type": event, "sequence_number": number, **fields}, ensure_ascii=False)
    return f"event: {event}\ndata: {data}\n\n"


FIRST_ASKED = 1 << 16  # the first index of items that were asked; those of the answer count from 0
_ITEM_ID = re.compile(r"[a-z]{2,8}_([0-9a-f]{32})[0-9a-f]{4,8}")


class ResponseAnswer:
    """One response: what was asked, and its items so far."""

    def __init__(
        self,
        response_id: str,
        model: str,
        body: ResponsesRequest,
        choice: Choice,
        reader: BlockReader,
        new_call_id: Callable[[], str],
        names: TokenNames,
    ) -> None:
        self.id = response_id
        self.is_background = body.background
        self.is_kept = body.store  # whether it can be named later
        self.reader = reader
        self._new_call_id = new_call_id
        self.wants_summary = body.wants_summary
        self._forms = call_forms(body.tools)
        self._choice = choice
        self._names = names if body.wants_logprobs else None
        self._described: dict[int, list[dict[str, Any]]] = {}  # logprobs by block, each token's written once
        self._created = int(time.time())
        self._asked = _asked(body, model, choice.request)
        self._ids: dict[tuple[str, int], str] = {}

    def response(self, status: str | None = None, error: MantaError | None = None) -> dict[str, Any]:
        """The response object. `status` None means that the answer has ended, and says how."""
        ended = status is None
        is_cut = ended and self.reader.finish is not None and self.reader.finish.finish_reason == "length"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if ended and not is_cut else None,
            "status": status or ("incomplete" if is_cut else "completed"),
            "background": self.is_background,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.items(),
            "usage": usage(self._choice, self.reader) if ended else None,
            "store": self.is_kept,
            **self._asked,
        }

    def items(self) -> list[dict[str, Any]]:
        """The items that there are; the last one is incomplete where the answer is cut short in it."""
        return [self.item(block, "incomplete" if block.is_cut else "completed") for block in self.reader.blocks]

    def item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        """`block` as an output item."""
        item: dict[str, Any] = {"id": self.item_id(block), "status": status}
        has_text = bool(block.said) and status != "in_progress"
        if block.kind == "text":
            content = [self.part(block, block.text)] if has_text else []
            return item | {"type": "message", "role": "assistant", "content": content}
        if block.kind == "call":
            call_id, form = self._ids.setdefault(("call", block.index), self._new_call_id()), self.form(block)
            given = form.fields(call_id, block.text if status != "in_progress" else "")
            return item | {"status": form.status(status)} | given
        parts = [self.part(block, block.text)] if has_text else []
        shown = {"summary": parts} if self.wants_summary else {"summary": [], "content": parts}
        return item | {"type": "reasoning", "encrypted_content": None, **shown}

    def part(self, block: ContentBlock, text: str) -> dict[str, Any]:
        """`text` as a content part of the item of `block`."""
        if block.kind == "text":
            logprobs = self.logprobs(block) if text else []
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "summary_text" if self.wants_summary else "reasoning_text", "text": text}

    def logprobs(self, block: ContentBlock) -> list[dict[str, Any]]:
        """Logprobs of a text's tokens; [] where they were not asked for."""
        described = self._described.setdefault(block.index, [])
        if self._names is not None:
            described += chat_logprobs(block.logprobs[len(described) :], self._names)["content"]
        return described

    def form(self, block: ContentBlock) -> CallForm:
        """The form of the tool that a block calls."""
        return self._forms.get(block.name) or FunctionForm(block.name)

    def item_id(self, block: ContentBlock) -> str:
        """The id of a block's item."""
        prefix = self.form(block).prefix if block.kind == "call" else _PREFIXES[block.kind]
        return item_id(prefix, self.id, block.index)


def usage(choice: Choice, reader: BlockReader) -> dict[str, Any]:
    """Tokens of an answer."""
    processor = choice.processor
    num_input, num_output = choice.request.num_client_tokens, processor.num_output_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": processor.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": reader.num_reasoning_tokens},
        "total_tokens": num_input + num_output,
    }


def _asked(body: ResponsesRequest, model: str, request: EngineRequest) -> dict[str, Any]:
    """The part of a response that repeats what was asked for, or what stood in for it."""
    reasoning, params = body.reasoning, request.sampling
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    choice = body.tool_choice
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        },
        "service_tier": tier_of(request.placement.service_class),
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if choice is not None and not isinstance(choice, str) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


class ResponseEvents(EventFormat):
    """The stream of one response. `keep` is awaited before the last event: whoever has that may name the response."""

    def __init__(self, answer: ResponseAnswer, keep: Callable[[], Awaitable[None]]) -> None:
        self._answer = answer
        self._keep = keep
        self.number = 0  # the next event's

    def start(self) -> str:
        """The response before anything was said."""
        response = self._answer.response("in_progress")
        created = "" if self._answer.is_background else self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def queued(self) -> str:
        """A background response before it has begun; `start` comes when it begins."""
        response = self._answer.response("queued")
        created = self._event("response.created", response=response)
        return created + self._event("response.queued", response=response)

    def event(self, event: Event) -> str:
        """Writes what one engine output changes in the items."""
        return "".join(map(self._change, self._answer.reader.read(event[1])))

    async def finish(self) -> None:
        """Keep the response."""
        await self._keep()

    def end(self) -> str:
        """The whole response."""
        response = self._answer.response()
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: MantaError) -> str:
        """The end of a stream that broke."""
        return self._event("response.failed", response=self._answer.response("failed", error))

    def _change(self, change: BlockChange) -> str:
        block, item_id = change.block, self._answer.item_id(change.block)
        place = {"item_id": item_id, "output_index": block.index}
        if change.step == "open":
            item = self._answer.item(block, "in_progress")
            added = self._event("response.output_item.added", output_index=block.index, item=item)
            return added + self._part(block, place, "added", "")
        if change.step == "grow":
            said, at = self._said(block), self._at(block, change.num_logprobs)
            return self._event(f"{said}.delta", **place, **at, delta=change.text) if said else ""
        done = self._said_whole(block, place)
        done += self._part(block, place, "done", block.text)
        item = self._answer.item(block, "incomplete" if block.is_cut else "completed")
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _said_whole(self, block: ContentBlock, place: dict[str, Any]) -> str:
        """The end of a block's text; calls that come as a whole have none."""
        if (said := self._said(block)) is None:
            return ""
        fields = self._answer.form(block).done(block.text) if block.kind == "call" else {"text": block.text}
        return self._event(f"{said}.done", **place, **self._at(block, len(block.logprobs)), **fields)

    def _part(self, block: ContentBlock, place: dict[str, Any], step: str, text: str) -> str:
        """The beginning or end of the only part of an item; calls have none."""
        if block.kind == "call":
            return ""
        part = self._answer.part(block, text)
        if block.kind == "reasoning" and self._answer.wants_summary:
            return self._event(f"response.reasoning_summary_part.{step}", **place, summary_index=0, part=part)
        return self._event(f"response.content_part.{step}", **place, content_index=0, part=part)

    def _said(self, block: ContentBlock) -> str | None:
        """The name of the events about a block's text."""
        if block.kind == "call":
            return self._answer.form(block).events
        if block.kind == "text":
            return "response.output_text"
        return "response.reasoning_summary_text" if self._answer.wants_summary else "response.reasoning_text"

    def _at(self, block: ContentBlock, num_logprobs: int) -> dict[str, Any]:
        """Says where in its item a block's text stands, with the logprobs of its last tokens."""
        if block.kind == "call":
            return {}
        if block.kind == "text":
            return {
                "content_index": 0,
                "logprobs": self._answer.logprobs(block)[-num_logprobs:] if num_logprobs else [],
            }
        return {"summary_index": 0} if self._answer.wants_summary else {"content_index": 0}

    def _event(self, event: str, /, **fields: Any) -> str:
        self.number += 1
        return event_text(event, self.number - 1, **fields)
