"""The envelope of all responses of the OpenAI dialect: the fields they begin with, and the usage they end with."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from app.api.generation.events import Choice
from app.text.served_model import ServedModel
from app.version import VERSION


@dataclass(slots=True)
class ResponseEnvelope:
    """Id, time and model of one response; the id is made by the server."""

    kind: str  # "chatcmpl" or "cmpl"
    model: str  # the name the client used
    fingerprint: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.kind}-{uuid.uuid4().hex}"

    @classmethod
    def of(cls, kind: str, model: ServedModel, name: str | None) -> ResponseEnvelope:
        """Envelope of a response from `model`, which the client calls `name`."""
        return cls(kind, name or model.name, fingerprint(model))

    def fields(self, object_name: str) -> dict[str, Any]:
        """The leading fields of a response or of each of its chunks."""
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def fingerprint(model: ServedModel) -> str:
    """Changes when the server's version or the model behind the name does."""
    adapter = "" if model.adapter is None else model.adapter.digest.hex()
    identity = f"{VERSION} {model.name} {model.info.directory} {model.max_model_len} {adapter}".rstrip()
    return "fp_" + hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()


def usage(choices: Iterable[Choice], counts_output: bool = True) -> dict[str, Any]:
    """Tokens so far: each prompt once however many choices it has, each choice's output; drafts where there were any
    (OpenAI's names are those of drafts that a client sends)."""
    num_prompt = num_output = num_cached = num_right = num_wrong = 0
    last_prompt = -1
    for choice in choices:
        if choice.prompt_index != last_prompt:
            last_prompt = choice.prompt_index
            num_prompt += choice.request.num_client_tokens
            num_cached += choice.processor.num_cached_tokens
        num_output += choice.processor.num_output_tokens if counts_output else 0
        num_right += choice.processor.num_right_drafts
        num_wrong += choice.processor.num_wrong_drafts
    drafts = {"accepted_prediction_tokens": num_right, "rejected_prediction_tokens": num_wrong}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        **({"completion_tokens_details": drafts} if num_right + num_wrong else {}),
    }
