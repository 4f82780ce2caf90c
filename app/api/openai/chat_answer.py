"""The whole answer of a chat in OpenAI's shape: for a client that does not stream, and for the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.api.chat.chat_request import ChatRequest
from app.api.chat.conversation import Conversation
from app.api.chat.envelope import usage
from app.api.generation.events import Collected
from app.api.openai.chunks import call_fields, chat_finish_reason, reasoning_fields
from app.api.openai.logprobs import chat_token_fields, prompt_logprobs, token_names
from app.parsers.base import ParsedAnswer


@dataclass(slots=True, frozen=True)
class SaidChoice:
    """One choice with what was found in its text; each call has an id."""

    collected: Collected
    answer: ParsedAnswer
    call_ids: Sequence[str]


def read_choices(collected: Sequence[Collected], conversation: Conversation) -> list[SaidChoice]:
    """Find reasoning, text and calls in choices that have ended."""
    return [_read(entry, conversation) for entry in collected]


def _read(entry: Collected, conversation: Conversation) -> SaidChoice:
    answer, output = ParsedAnswer(), entry.output
    if not conversation.parsers:
        answer.content = output.text
        return SaidChoice(entry, answer, ())
    parser = conversation.parsers[output.index]
    answer.add(parser.push(output.text))
    answer.add(parser.flush())
    return SaidChoice(entry, answer, [conversation.plan.new_call_id() for _ in answer.calls])


def chat_answer(conversation: Conversation, body: ChatRequest, said: Sequence[SaidChoice]) -> dict[str, Any]:
    """The `chat.completion`, for `json_response`."""
    choices = [_choice(one, conversation, body) for one in said]
    counts = usage(conversation.stream.choices)
    answer = conversation.envelope.fields("chat.completion") | {"choices": choices, "usage": counts}
    return answer | _prompt_fields(conversation, body, said[0].collected)


def _choice(said: SaidChoice, conversation: Conversation, body: ChatRequest) -> dict[str, Any]:
    output = said.collected.output
    names = token_names(conversation.model.tokenizer, body.return_tokens_as_token_ids)
    return {
        "index": output.index,
        "message": _message(said, conversation, body),
        "logprobs": None,
        "finish_reason": chat_finish_reason(output.finish_reason, len(said.call_ids), body.calls_finish_reason()),
        "stop_reason": output.stop_reason,
        "token_ids": None,
        **chat_token_fields(output, names, logprobs=body.logprobs, token_ids=body.return_token_ids, is_whole=True),
    }


def _message(said: SaidChoice, conversation: Conversation, body: ChatRequest) -> dict[str, Any]:
    """The assistant's message."""
    answer = said.answer
    content = body.echoed_text() + answer.content or (None if answer.calls or answer.reasoning else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "reasoning": None}
    if answer.reasoning and body.include_reasoning:
        message |= reasoning_fields(answer.reasoning)
    if answer.calls:
        custom = conversation.plan.custom
        message["tool_calls"] = [
            call_fields(call.name, call_id, call.arguments, call.name in custom)
            for call, call_id in zip(answer.calls, said.call_ids, strict=True)
        ]
    return message


def _prompt_fields(conversation: Conversation, body: ChatRequest, first: Collected) -> dict[str, Any]:
    """vLLM's extensions about the prompt; null where they are not asked for, as clients read them without asking."""
    fields: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None}
    entries = first.prompt_logprobs
    if body.prompt_logprobs is not None and entries is not None:
        fields["prompt_logprobs"] = prompt_logprobs(entries, conversation.model.tokenizer)
    if body.return_token_ids:
        fields["prompt_token_ids"] = conversation.stream.choices[0].request.client_token_ids
    return fields
