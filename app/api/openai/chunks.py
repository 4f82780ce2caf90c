"""Chunks of the two streams, in OpenAI's exact shapes: role or echo first, text, finish, usage, [DONE].

The usual chunk (text and nothing else) is two prebuilt strings around the escaped text; only what carries logprobs,
token ids, calls or running usage is built as an object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.api.chat.conversation import Conversation
from app.api.chat.envelope import ResponseEnvelope, usage
from app.api.generation.events import Choice, Event
from app.api.generation.sse import DONE, EventFormat, json_string
from app.api.openai.echo import Echo
from app.api.openai.logprobs import TokenIdNames, TokenNames, chat_token_fields, completion_logprobs
from app.parsers.scanner import Part
from app.text.output_processor import TextDelta
from app.text.tokenizer import Tokenizer

_END = "}\n\n"


@dataclass(slots=True, frozen=True)
class OutputOptions:
    """Says what the client wants to see besides text."""

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    reasoning: bool = True
    names_are_ids: bool = False
    echo: str = ""  # goes before the text of each choice of a chat


class ChunkFormat(EventFormat):
    """Writes what the formats of both endpoints share: the frame of a chunk, usage, the end."""

    object_name: str

    def __init__(
        self,
        envelope: ResponseEnvelope,
        choices: Sequence[Choice],
        tokenizer: Tokenizer,
        options: OutputOptions,
        counts_output: bool = True,
    ) -> None:
        self._choices = choices
        self._counts_output = counts_output
        self._names: TokenNames = TokenIdNames() if options.names_are_ids else tokenizer
        self._options = options
        fields = json.dumps(envelope.fields(self.object_name), ensure_ascii=False)
        self._frame = f'data: {fields[:-1]}, "choices": ['
        self._close = "]" + (', "usage": null' if options.include_usage else "") + _END
        # Chunks that carry nothing but text take the short way.
        self._is_plain = not (options.continuous_usage or options.logprobs or options.token_ids)

    def chunk(self, choice: dict[str, Any], *, is_start: bool = False, **envelope: Any) -> str:
        """One chunk about one choice; `envelope` are fields beside `choices`. At the start no output counts yet."""
        body = self._frame + json.dumps(choice, ensure_ascii=False)
        close = self._close
        if self._options.continuous_usage:
            close = f'], "usage": {json.dumps(usage(self._choices, self._counts_output and not is_start))}{_END}'
        if envelope:
            close = close.removesuffix(_END) + f", {json.dumps(envelope, ensure_ascii=False)[1:]}\n\n"
        return body + close

    def end(self) -> str:
        """The usage chunk, if wanted, and the end of the stream."""
        if not self._options.include_usage:
            return DONE
        return f'{self._frame}], "usage": {json.dumps(usage(self._choices, self._counts_output))}{_END}{DONE}'


class ChatChunks(ChunkFormat):
    """`chat.completion.chunk` events. `calls_reason` is the finish reason of an answer that ends with calls."""

    object_name = "chat.completion.chunk"

    def __init__(self, conversation: Conversation, options: OutputOptions, calls_reason: str = "tool_calls") -> None:
        choices = conversation.stream.choices
        super().__init__(conversation.envelope, choices, conversation.model.tokenizer, options)
        self._parsers = conversation.parsers
        self._plan = conversation.plan
        self._calls_reason = calls_reason
        self._call_ids: list[list[str]] = [[] for _ in choices]
        self._writes_text = [False] * len(choices)  # the last call is of a custom tool
        self._prefixes = [f'{self._frame}{{"index": {c.index}, "delta": {{"content": ' for c in choices]
        self._suffix = f'}}, "logprobs": null, "finish_reason": null}}{self._close}'

    def start(self) -> str:
        """The role of each choice, and what is echoed before its text."""
        roles, echo = map(self._role, self._choices), self._options.echo
        return "".join((*roles, *(self._echoed(choice, echo) for choice in self._choices if echo)))

    def event(self, event: Event) -> str:
        """Reasoning, text, calls and finish of one engine output."""
        choice, delta = event
        parts = self._parse(choice, delta)
        if self._is_plain and delta.finish_reason is None:
            return "".join(self._plain(choice, part) for part in parts)
        deltas = [self._fields(choice, part) for part in parts]
        extra = self._extra(delta)
        out = self._delta(choice, deltas[0] if deltas else {"content": ""}, **extra) if deltas or extra else ""
        out += "".join(self._delta(choice, fields) for fields in deltas[1:])
        return out + self._finish(choice, delta) if delta.finish_reason is not None else out

    def _role(self, choice: Choice) -> str:
        """The first chunk of a choice; the very first brings the prompt's token ids, where they are asked for."""
        envelope: dict[str, Any] = {}
        if self._options.token_ids and choice.index == 0:
            envelope["prompt_token_ids"] = choice.request.client_token_ids
        delta = {"role": "assistant", "content": ""}
        fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk(fields, is_start=True, **envelope)

    def _echoed(self, choice: Choice, text: str) -> str:
        fields = {"index": choice.index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return self.chunk(fields, is_start=True)

    def _parse(self, choice: Choice, delta: TextDelta) -> list[Part]:
        if not self._parsers:
            return [Part("content", delta.text)] if delta.text else []
        parser = self._parsers[choice.index]
        parts = parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += parser.flush()
        return parts if self._options.reasoning else [part for part in parts if part.kind != "reasoning"]

    def _plain(self, choice: Choice, part: Part) -> str:
        """A chunk of one part and nothing else."""
        if part.kind == "content":
            return f"{self._prefixes[choice.index]}{json_string(part.text)}{self._suffix}"
        return self._delta(choice, self._fields(choice, part))

    def _fields(self, choice: Choice, part: Part) -> dict[str, Any]:
        """Returns what a part adds to the message."""
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return reasoning_fields(part.text)
        if part.kind == "call":
            call_id = self._plan.new_call_id()
            self._call_ids[choice.index].append(call_id)
            self._writes_text[choice.index] = part.text in self._plan.custom
            call = call_fields(part.text, call_id, "", self._writes_text[choice.index])
            if self._writes_text[choice.index]:
                del call["type"]  # OpenAI's schema of chunks knows one type only, and lets it be absent
        elif self._writes_text[choice.index]:
            call = {"custom": {"input": part.text}}
        else:
            call = {"function": {"arguments": part.text}}
        return {"tool_calls": [{"index": len(self._call_ids[choice.index]) - 1, **call}]}

    def _extra(self, delta: TextDelta) -> dict[str, Any]:
        """Returns what goes with the tokens of a delta: all of it into its first chunk."""
        wanted = self._options
        return chat_token_fields(
            delta, self._names, logprobs=wanted.logprobs, token_ids=wanted.token_ids, is_whole=False
        )

    def _finish(self, choice: Choice, delta: TextDelta, **envelope: Any) -> str:
        reason = chat_finish_reason(delta.finish_reason, len(self._call_ids[choice.index]), self._calls_reason)
        fields = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": reason}
        return self.chunk(fields | {"stop_reason": delta.stop_reason}, **envelope)

    def _delta(self, choice: Choice, delta: dict[str, Any], **extra: Any) -> str:
        fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        return self.chunk(fields)


class CompletionChunks(ChunkFormat):
    """`text_completion` events. `echoes[i]` is what choice i puts before its text; empty without echo.

    `hides_output` is for max_tokens=0: the prompt is scored, nothing generated is shown.
    """

    object_name = "text_completion"

    def __init__(
        self,
        envelope: ResponseEnvelope,
        choices: Sequence[Choice],
        tokenizer: Tokenizer,
        options: OutputOptions,
        echoes: Sequence[Echo],
        hides_output: bool = False,
    ) -> None:
        super().__init__(envelope, choices, tokenizer, options, counts_output=not hides_output)
        self._echoes = echoes
        self._hides_output = hides_output
        self._begun: set[int] = set()  # choices whose prompt's token ids have been sent
        self._prefixes = [f'{self._frame}{{"index": {c.index}, "text": ' for c in choices]
        self._suffix = f', "logprobs": null, "finish_reason": null}}{self._close}'

    def start(self) -> str:
        """The echoed prompts, unless they must wait for their logprobs."""
        if not self._echoes or self._options.logprobs:
            return ""
        texts = [(choice, self._echoes[choice.index].text) for choice in self._choices]
        return "".join(self._text(choice, text, is_start=True) for choice, text in texts)

    def event(self, event: Event) -> str:
        """Text and finish of one engine output."""
        choice, delta = event
        if self._is_plain and delta.finish_reason is None:
            return f"{self._prefixes[choice.index]}{json_string(delta.text)}{self._suffix}" if delta.text else ""
        out = self._scored_prompt(choice, delta)
        if self._hides_output:
            return out + self._text(choice, "", finish_reason="length") if delta.finish_reason else out
        out += self._content(choice, delta)
        if delta.finish_reason is None:
            return out
        return out + self._text(choice, "", finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)

    def _scored_prompt(self, choice: Choice, delta: TextDelta) -> str:
        """The echoed prompt with its logprobs, which come with the first output."""
        if not self._echoes or delta.prompt_logprobs is None:
            return ""
        echo = self._echoes[choice.index]
        return self._text(choice, echo.text, logprobs=echo.logprobs(delta.prompt_logprobs, self._names))

    def _content(self, choice: Choice, delta: TextDelta) -> str:
        extra: dict[str, Any] = {}
        if self._options.logprobs and delta.logprobs:
            start = len(self._echoes[choice.index].text) if self._echoes else 0
            offsets = [start + offset for offset in delta.text_offsets or ()]
            extra["logprobs"] = completion_logprobs(delta.logprobs, delta.token_ids, offsets, self._names)
        if self._options.token_ids and delta.token_ids:
            extra["token_ids"] = delta.token_ids
        return self._text(choice, delta.text, **extra) if delta.text or extra else ""

    def _text(self, choice: Choice, text: str, *, is_start: bool = False, **extra: Any) -> str:
        fields = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None, **extra}
        if self._options.token_ids and choice.index not in self._begun:
            self._begun.add(choice.index)
            fields["prompt_token_ids"] = choice.request.client_token_ids
        return self.chunk(fields, is_start=is_start)


def call_fields(name: str, call_id: str, given: str, is_custom: bool) -> dict[str, Any]:
    """A tool call as the OpenAI dialect writes it; `given` are its arguments, or the input of a custom tool."""
    if is_custom:
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": given}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def reasoning_fields(text: str) -> dict[str, Any]:
    """Reasoning under both of the names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def chat_finish_reason(reason: str | None, num_calls: int, calls_reason: str = "tool_calls") -> str | None:
    """`calls_reason` when the answer ended by itself with calls in it."""
    return calls_reason if reason == "stop" and num_calls else reason
