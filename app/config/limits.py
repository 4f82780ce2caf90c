"""The limits of one HTTP request: the section `limits` of the ingress."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.bounds import MAX_TEXT_CHARS
from app.config.frozen import Frozen


class RequestLimits(Frozen):
    """Bounds what one HTTP request may ask for."""

    max_body_bytes: int = Field(32 << 20, ge=1, description="Largest HTTP body, but for a file's.")
    max_file_bytes: int = Field(128 << 20, ge=1, description="Largest file that may be uploaded.")
    max_sound_bytes: int = Field(25 << 20, ge=1, description="Largest file of one sound.")
    max_body_s: float = Field(120.0, gt=0, description="Longest that an HTTP body may take to arrive, in seconds.")
    max_body_gap_s: float = Field(
        20.0, gt=0, description="Longest silence of a client that has not sent all of its body yet, in seconds."
    )
    max_bodies_bytes: int = Field(
        1 << 30,
        ge=1,
        description="Memory for the bodies, pictures and their pixels of all requests in flight in an ingress replica; "
        "half of it for one tenant. What finds no room gets a 429.",
    )
    max_n: int = Field(128, ge=1, description="Most choices of one request (`n`).")
    max_choices: int = Field(1024, ge=1, description="Most choices of all prompts of one request together.")
    max_beam_tokens: int = Field(
        32768, ge=1, description="Most tokens of all beams of one request together: beams x max_tokens, of all prompts."
    )
    max_prompts: int = Field(1024, ge=1, description="Most prompts in one completions request.")
    max_prompt_chars: int = Field(
        8 << 20, ge=1, le=MAX_TEXT_CHARS, description="Most characters of all texts of one request together."
    )
    max_logprobs: int = Field(
        20, ge=0, description="Most logprobs a token; -1 in a request asks for as many as the vocabulary has."
    )
    max_stop: int = Field(16, ge=0, description="Most stop strings.")
    max_stop_chars: int = Field(1024, ge=1, description="Longest stop string, in characters.")
    max_logit_bias: int = Field(1024, ge=0, description="Most entries of `logit_bias`, and of `stop_token_ids`.")
    max_bad_words: int = Field(128, ge=0, description="Most bad words.")
    max_bad_words_chars: int = Field(8192, ge=0, description="Most characters of all bad words together.")
    max_tools: int = Field(128, ge=0, description="Most tools of one request.")
    max_tools_bytes: int = Field(1 << 20, ge=1, description="Largest definition of all tools together, as JSON.")
    max_messages: int = Field(4096, ge=1, description="Most messages or items of one conversation.")
    unknown_fields: Literal["auto", "refuse", "ignore"] = Field(
        "auto", description="Fields that no table knows. auto: of /v1/responses and /v1/messages ignored, else refused."
    )
    max_json_depth: int = Field(64, ge=1, description="Deepest nesting of a JSON body.")
    max_headers: int = Field(100, ge=1, description="Most HTTP headers.")
    max_header_bytes: int = Field(32 << 10, ge=1, description="Largest HTTP header block, names and values together.")
    max_template_s: float = Field(5.0, gt=0, description="Longest that a chat template may take over a conversation.")
    max_template_chars: int = Field(8 << 20, ge=1, description="Longest prompt that a chat template may write.")
    trust_request_chat_template: bool = Field(
        False, description="Let a request bring its own `chat_template`; it runs in a process of its own, with limits."
    )
    max_waiting_requests: int = Field(4096, ge=1, description="Requests in flight per ingress replica before a 429.")
