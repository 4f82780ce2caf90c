"""The table of limits: how a body of each route exceeds each limit of `limits` (app/config/limits.py).

The routes come from the application and the limits from the configuration, so a new one of either fails
tests/api/test_limit_table.py until its line stands here:

- a new limit: in CARRIERS, with the fields that carry it; in EVERYWHERE, where it holds for whatever is sent; or in
  ELSEWHERE, with the test that holds it;
- a new route that reads JSON: a valid body in json_routes.py (TEXT_BODIES), or in BODIES here if it brings no text;
- any other route: nothing, if it reads no body; else a line in UNLIKE, with the test that holds its limits, and in
  FORMS, if it is multipart;
- a new field of a body: in CARRIERS under the limit that bounds it, or in BOUNDED_OTHERWISE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.api.server.invocations import ROUTES as INVOCATIONS
from tests.api.json_routes import Body, bodies

HI = {"role": "user", "content": "hi"}
ADD: Body = {"type": "function", "function": {"name": "add", "description": "x" * 100}}
TALK = [HI, {"role": "assistant", "content": "hi"}, HI]

CHAT = ("/v1/chat/completions", "/v1/chat/completions/render", "/v1/chat/completions/batch")
COMPLETIONS = ("/v1/completions", "/v1/completions/render")
RESPONSES = ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
POOLING = ("/v1/embeddings", "/classify", "/pooling")
SCORES = ("/score", "/v1/score")
RANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
COUNTING = "/v1/responses/input_tokens"
BATCH = "/v1/chat/completions/batch"
SEARCHES = ("/v1/chat/completions", "/v1/completions", "/generate")

# Valid bodies of JSON routes that bring no text.
BODIES: Mapping[str, Body] = {
    "/detokenize": {"tokens": [1]},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/chat/completions/{completion_id}": {"metadata": {"a": "b"}},
    "/v1/uploads": {"bytes": 9, "filename": "a", "mime_type": "application/jsonl", "purpose": "batch"},
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_1"]},
    "/v1/messages/batches": {
        "requests": [{"custom_id": "a", "params": {"model": "m", "max_tokens": 2, "messages": [HI]}}]
    },
}
# Routes whose bodies have the fields of another's besides their own.
FIELDS_OF = {BATCH: "/v1/chat/completions"}
# Bodies that no schema describes, and the test that holds their limits.
UNLIKE = {
    "POST /v1/files": "multipart, to disk: tests/api/batches/test_endpoint.py::test_what_is_no_file",
    "POST /v1/uploads/x/parts": "multipart, to disk: tests/api/batches/test_upload_store.py::test_refusals_of_a_part",
    "POST /v1/audio/transcriptions": "tests/api/openai/audio/test_endpoint.py::test_a_larger_file_is_refused",
    "POST /v1/audio/translations": "the same",
    "POST /invocations": "each body goes to its own route: see doors()",
}
FORMS = (
    "/v1/files",
    "/v1/uploads/x/parts",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)  # of those, what is multipart


@dataclass(frozen=True)
class Carrier:
    """A field of a body that exceeds a limit, with the fields that it needs beside it."""

    name: str  # of the field; "a.b" is within another
    value: Any
    beside: Body = field(default_factory=dict)
    on: tuple[str, ...] = ()  # the routes where the field means this; () is all that have it
    off: tuple[str, ...] = ()  # the routes where it does not
    param: str = ""  # the field that the answer names, if it is another

    def serves(self, path: str) -> bool:
        """True where the field carries the limit."""
        return path in self.on if self.on else path not in self.off

    def names(self, param: str | None) -> bool:
        """True for the field itself, and for a part of it."""
        return param is not None and f"{param}.".startswith(f"{self.param or self.name}.")

    def body(self, base: Body) -> Body:
        """The body with the field in it."""
        outer, _, inner = self.name.partition(".")
        value = {**base.get(outer, {}), inner: self.value} if inner else self.value
        return {**base, **self.beside, outer: value}


@dataclass(frozen=True)
class Line:
    """One limit, set so low that each of its carriers exceeds it."""

    low: Any
    carriers: tuple[Carrier, ...]


def _sampling(name: str, value: Any) -> tuple[Carrier, Carrier]:
    """A field of sampling, and the same where token ids are sent."""
    return Carrier(name, value, off=(COUNTING,)), Carrier(f"sampling_params.{name}", value)


_CONVERSATION = (
    Carrier("messages", TALK, off=(BATCH,)),
    Carrier("messages", [TALK], on=(BATCH,)),
    Carrier("input", TALK, on=RESPONSES),
)
_TOOL = (
    Carrier("tools", [ADD, {"type": "function", "function": {"name": "sub"}}], off=(*RESPONSES, *MESSAGES)),
    Carrier("tools", [{"type": "function", "name": n, "parameters": {"title": "x" * 99}} for n in "ab"], on=RESPONSES),
    Carrier("tools", [{"name": n, "input_schema": {"type": "object", "title": "x" * 99}} for n in "ab"], on=MESSAGES),
)
_SEARCH = {"n": 2, "max_tokens": 8}
_PROMPTS = (
    Carrier("prompt", ["hi", "ho"], on=COMPLETIONS),
    Carrier("messages", [[HI], [HI]], on=(BATCH,)),
)
CARRIERS: Mapping[str, Line] = {
    "max_n": Line(1, (*_sampling("n", 2), Carrier("best_of", 2))),
    "max_choices": Line(1, (*_sampling("n", 2), Carrier("best_of", 2), *_PROMPTS)),
    "max_beam_tokens": Line(
        1, (Carrier("use_beam_search", True, {"n": 2, "max_tokens": 8}, on=SEARCHES, param="max_tokens"),)
    ),
    "max_prompts": Line(
        1,
        (
            *_PROMPTS,
            Carrier("input", ["hi", "ho"], on=POOLING),
            Carrier("text_2", ["hi", "ho"]),
            Carrier("items", ["hi", "ho"]),
            Carrier("texts", ["hi", "ho"]),
            Carrier("inputs", [{"content": [{"type": "text", "text": "hi"}]}] * 2),
            Carrier("documents", ["hi", "ho"], on=(*SCORES, *RANKS)),
        ),
    ),
    "max_logprobs": Line(
        1,
        (
            Carrier("logprobs", 2, on=COMPLETIONS),
            Carrier("top_logprobs", 2, {"logprobs": True}, on=CHAT),
            Carrier("top_logprobs", 2, {"include": ["message.output_text.logprobs"]}, on=("/v1/responses",)),
            Carrier("prompt_logprobs", 2, off=("/generate", BATCH)),
            Carrier("sampling_params.logprobs", 2),
            Carrier("sampling_params.prompt_logprobs", 2),
        ),
    ),
    "max_stop": Line(1, (*_sampling("stop", ["a", "b"]), Carrier("stop_sequences", ["a", "b"]))),
    "max_stop_chars": Line(2, (*_sampling("stop", ["abc"]), Carrier("stop_sequences", ["abc"]))),
    "max_logit_bias": Line(1, (*_sampling("logit_bias", {"1": 1, "2": 1}), *_sampling("stop_token_ids", [1, 2]))),
    "max_bad_words": Line(1, _sampling("bad_words", ["a", "b"])),
    "max_bad_words_chars": Line(2, _sampling("bad_words", ["abc"])),
    "max_tools": Line(1, _TOOL),
    "max_tools_bytes": Line(50, _TOOL),
    "max_messages": Line(2, _CONVERSATION),
    "max_template_chars": Line(
        20,
        (
            *_CONVERSATION,
            Carrier("messages", TALK, on=POOLING),
        ),
    ),
    "max_template_s": Line(1e-9, _CONVERSATION),
    "trust_request_chat_template": Line(False, (Carrier("chat_template", "{{ messages }}"),)),
}
# What holds for any bytes, whatever the fields: tested on each route.
EVERYWHERE = {
    "max_headers",
    "max_header_bytes",
    "max_body_bytes",
    "max_body_s",
    "max_body_gap_s",
    "max_bodies_bytes",
    "max_json_depth",
    "max_prompt_chars",  # by the texts of json_routes.py
}
ELSEWHERE = {
    "max_file_bytes": "one route takes files: tests/api/batches/test_endpoint.py::test_what_is_no_file",
    "max_sound_bytes": "of forms: tests/api/openai/audio/test_endpoint.py::test_a_larger_file_is_refused",
    "unknown_fields": "tests/api/http/test_field_rule.py::test_the_option_holds_for_all_routes",
    "max_waiting_requests": "before any route: tests/deployments/ingress/test_readiness.py::test_room_for_requests",
}

_NAME = "a name, a flag, a number or one of a few words: its type bounds it"
_TYPED = "an object or a list whose parts have types with bounds"
_FREE = "free form: bounded by what a body may hold (members, values, depth), and by what the template may write"
_SUM = "a text: bounded with all others of the request by max_prompt_chars"
_IDS = "token ids: bounded by the vocabulary, the context and what a body may hold"
_COMPILED = "compiled in a process with limits of its own: tests/structured/test_compiler.py"
_NOT_USED = "nothing is generated"
_COUNTED = "a number of tokens: bounded by the context"
# Fields that carry none of the limits above, and what bounds them. tests/api/test_bounds.py walks all their types.
BOUNDED_OTHERWISE: Mapping[str, tuple[str, ...]] = {
    _NAME: (
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("seed", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "priority", "cache_salt"),
        *("service_tier", "model", "stream", "stream_interval", "truncation_side", "return_tokens_as_token_ids"),
        *("spaces_between_special_tokens", "session_id", "return_token_ids", "request_id", "length_penalty"),
        *("early_stopping", "parallel_tool_calls", "include_reasoning", "reasoning_effort", "verbosity"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "store", "prompt_cache_key"),
        *("echo", "previous_response_id", "background", "truncation", "max_tool_calls", "user", "safety_identifier"),
        *("speed", "use_activation", "encoding_format", "dimensions", "normalize", "top_n", "return_documents"),
        *("prompt_name", "input_type", "output_dimension", "truncate"),
        *("task", "return_token_strs", "input_file_id", "endpoint", "completion_window", "apply_softmax"),
        *("item_first", "bytes", "filename", "mime_type", "purpose", "md5"),
        *(f"logprobs of {path}" for path in (*CHAT, "/generate")),
        *(f"use_beam_search of {path}" for path in (*CHAT[1:], *COMPLETIONS[1:])),  # refused
        *(f"prompt_logprobs of {path}" for path in (BATCH, "/generate")),  # refused
    ),
    _TYPED: (
        *("logprob_token_ids", "repetition_detection", "stream_options", "modalities", "metadata", "include"),
        *("tool_choice", "reasoning", "thinking", "context_management", "output_expires_after", "requests"),
        *("expires_after", "part_ids", "embedding_types", "score_weights"),
    ),
    _FREE: ("chat_template_kwargs", *(f"documents of {path}" for path in CHAT)),
    _SUM: (
        *("instructions", "instruction", "system", "query", "queries", "text_1", "data_1", "data_2"),
        *(f"prompt of {path}" for path in ("/generate", "/tokenize")),
    ),
    _IDS: ("allowed_token_ids", "token_ids", "tokens", "label_token_ids"),
    _COMPILED: ("structured_outputs", "response_format", "text", "output_config"),
    _NOT_USED: tuple(
        f"{name} of {COUNTING}" for name in ("stop", "stop_token_ids", "logit_bias", "bad_words", "top_logprobs")
    ),
    _COUNTED: (
        *("max_tokens", "min_tokens", "max_completion_tokens", "max_output_tokens", "thinking_token_budget"),
        *("truncate_prompt_tokens", "max_tokens_per_doc"),
    ),
}


def base(path: str, carrier: Carrier | None = None) -> Body:
    """A valid body of the route, with its prompt in the field of `carrier` or, for tools, in messages if it may."""
    if path in BODIES:
        return BODIES[path]
    found = bodies(path, "hi")
    wanted = "" if carrier is None else "messages" if carrier.name == "tools" else carrier.name
    return next((body for body in found if wanted in body), found[0])


def doors(path: str, body: Body) -> list[str]:
    """The routes by which a body comes to a route: its own, and /invocations if that would pass it on there."""
    passed_on = next((to for names, to in INVOCATIONS.items() if body.keys() >= set(names)), None)
    return [path, "/invocations"] if passed_on == path else [path]


def fields_of(document: Body, path: str) -> dict[str, Body]:
    """The fields of a route's body with their schemas, those of sampling parameters within it too."""
    found: dict[str, Body] = {}
    for like in (path, FIELDS_OF.get(path)):
        if like is not None:
            found = {**_properties(document, _schema(document, like)), **found}
    if "sampling_params" in found:
        inner = _properties(document, found.pop("sampling_params"))
        found |= {f"sampling_params.{name}": schema for name, schema in inner.items()}
    return found


def _schema(document: Body, path: str) -> Body:
    schema: Body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def _properties(document: Body, schema: Body) -> dict[str, Body]:
    properties: dict[str, Body] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    return properties


def is_known(path: str, name: str) -> bool:
    """True where the table says what bounds the field."""
    carried = any(one.name == name and one.serves(path) for line in CARRIERS.values() for one in line.carriers)
    plain = name.removeprefix("sampling_params.")
    return carried or any({plain, f"{plain} of {path}"} & set(names) for names in BOUNDED_OTHERWISE.values())
