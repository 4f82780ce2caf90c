"""The requests of every run: all dialects, and all that a stream carries from one token to the next.

Each has a fixed seed or is greedy, so its answer is known: that of an undisturbed run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from loadtest.prompts import sentences

MODEL = "tiny-chat"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
POISON_SEED = 666_666  # ends every engine of harmful_app.py; of no request of ours

_STORY = [{"role": "user", "content": "Tell me a long story about a ship."}]
_QUESTION = [{"role": "user", "content": "Who are you?"}]
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "new": {"type": "boolean"},
    },
    "required": ["name", "count", "new"],
    "additionalProperties": False,
}
_LIST = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": _ITEM, "minItems": 40}},
    "required": ["items"],
    "additionalProperties": False,
}
_TOOL = {"name": "store", "description": "Store a list of items.", "parameters": _LIST}
_PENALTIES = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {"300": 2.0, "301": -3.0},
    "bad_words": ["the", "sea"],
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; its body without `model`."""

    name: str
    path: str
    body: dict[str, Any]


def probe() -> Ask:
    """A short request, as of somebody who has just come."""
    return Ask("probe", COMPLETIONS, {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True})


def mixed(num_tokens: int) -> list[Ask]:
    """Requests of every kind, with answers of about `num_tokens` tokens where the answer's length is free."""
    chat = {"messages": _STORY, "max_tokens": num_tokens, "min_tokens": num_tokens, "stream": True}
    chat["stream_options"] = {"include_usage": True}
    sampled = {**chat, "temperature": 1.0, "top_p": 0.95}
    return [
        Ask("chat greedy", CHAT, {**chat, "temperature": 0}),
        Ask("chat sampled", CHAT, {**sampled, "seed": 11}),
        Ask("chat penalties", CHAT, {**sampled, **_PENALTIES, "seed": 12, "top_k": 50}),
        Ask("chat n=3", CHAT, {**sampled, "seed": 13, "n": 3}),
        Ask("chat logprobs", CHAT, {**sampled, "seed": 14, "logprobs": True, "top_logprobs": 3}),
        Ask("chat thinking", CHAT, {**sampled, "seed": 15, "chat_template_kwargs": {"enable_thinking": True}}),
        Ask("chat schema", CHAT, {**_without_least(sampled), "seed": 16, **_chat_schema()}),
        Ask("chat tools", CHAT, {**_without_least(sampled), "seed": 17, **_chat_tools()}),
        Ask("chat whole", CHAT, {**_collected(sampled), "seed": 18, "n": 2}),
        Ask("chat batch", f"{CHAT}/batch", {**_collected(sampled), "seed": 19, "messages": [_STORY, _QUESTION]}),
        *_completions(num_tokens),
        *_other_dialects(num_tokens),
    ]


def _completions(num_tokens: int) -> list[Ask]:
    base: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    long = sentences(random.Random(5), 500)
    several = [f"Chapter {number}. {sentences(random.Random(number), 20)}" for number in range(3)]
    numbers = {"structured_outputs": {"regex": "([a-z]{3,8}-[0-9]{2,4} ){80,90}end"}}
    return [
        Ask("completion long prompt", COMPLETIONS, {**base, "prompt": long, "temperature": 0, "logprobs": 2}),
        Ask("completion prompts", COMPLETIONS, {**base, "prompt": several, "temperature": 0.8, "seed": 21}),
        Ask("completion stop", COMPLETIONS, {**base, "prompt": "Count", "seed": 22, "stop": ["zzz"], "min_p": 0.02}),
        Ask("completion regex", COMPLETIONS, {**base, "prompt": "Words: ", "seed": 23, "ignore_eos": False, **numbers}),
        Ask("completion echo", COMPLETIONS, {**base, "prompt": long[:600], "seed": 24, "echo": True, "logprobs": 1}),
        Ask(
            "completion prompt logprobs",
            COMPLETIONS,
            {**_collected(base), "prompt": long, "temperature": 0, "prompt_logprobs": 1},
        ),
    ]


def _other_dialects(num_tokens: int) -> list[Ask]:
    params = {"max_tokens": num_tokens, "ignore_eos": True, "seed": 31, "logprobs": 1, "temperature": 0.9}
    responses = {"input": "Tell me about rivers.", "max_output_tokens": num_tokens, "stream": True}
    function = {"type": "function", "strict": True, **_TOOL}
    text = {"format": {"type": "json_schema", "name": "list", "strict": True, "schema": _LIST}}
    messages = {"messages": _STORY, "max_tokens": num_tokens, "stream": True, "model": MODEL, "temperature": 0}
    tool = {"name": "store", "description": _TOOL["description"], "input_schema": _LIST}
    forced = {"tools": [tool], "tool_choice": {"type": "any"}}
    return [
        Ask("generate ids", GENERATE, {"token_ids": list(range(300, 360)), "sampling_params": params, "stream": True}),
        Ask("responses", RESPONSES, {**responses, "seed": 32, "temperature": 1.0, "ignore_eos": True}),
        Ask("responses schema", RESPONSES, {**responses, "seed": 33, "text": text}),
        Ask("responses tools", RESPONSES, {**responses, "seed": 34, "tools": [function], "tool_choice": "required"}),
        Ask("messages", MESSAGES, messages),
        Ask("messages tools", MESSAGES, {**messages, **forced}),
    ]


def _without_least(body: dict[str, Any]) -> dict[str, Any]:
    """A grammar decides where the answer ends."""
    return {name: value for name, value in body.items() if name != "min_tokens"}


def _collected(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}


def _chat_schema() -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "list", "strict": True, "schema": _LIST}}
    }


def _chat_tools() -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**_TOOL, "strict": True}}], "tool_choice": "required"}
