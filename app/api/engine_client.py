"""The one thing the HTTP dialects need from the rest of Manta: somewhere to send token ids.

`app/api` knows neither Ray nor the engine's loop; the ingress deployment (row 6) implements EngineClient over the
router and the token channels, tests implement it over an engine in the same process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.engine.model_info import ModelInfo
from app.engine.outputs import EngineOutput
from app.engine.pooling.info import PoolingInfo
from app.engine.request import EngineRequest
from app.engine.request_bounds import RequestBounds
from app.errors import MantaError
from app.telemetry.request_record import GenerationRecord
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer


@dataclass(slots=True)
class ServedModel:
    """One model as the ingress sees it: names, text tools, limits."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    max_kv_tokens: int | None = None  # tokens that the whole KV cache of one replica holds; None while unknown
    aliases: tuple[str, ...] = ()
    created: int = 0  # seconds since the epoch
    max_num_seqs: int | None = None  # requests that all replicas together run at a time; None where unknown
    num_replicas: int = 1  # that those are, at least
    pooling: PoolingInfo | None = None  # set for a model that gives vectors; None: it generates
    tool_parser: str = "auto"  # as ModelConfig has them
    reasoning_parser: str = "auto"

    @property
    def bounds(self) -> RequestBounds:
        """What one request may ask of it."""
        info = self.info
        return RequestBounds(info.vocab_size, info.eos_token_ids, self.max_model_len, self.max_kv_tokens, self.pooling)

    @property
    def max_running(self) -> int:
        """Requests of one HTTP request that may be in the engines at a time: they leave a quarter of the rows to
        others, who so need not wait for all of them."""
        return sys.maxsize if self.max_num_seqs is None else _most_of(self.max_num_seqs)

    @property
    def max_running_of_prompt(self) -> int:
        """The same for the choices of one prompt, which all run on one replica."""
        return sys.maxsize if self.max_num_seqs is None else _most_of(self.max_num_seqs // self.num_replicas)


def _most_of(num_rows: int) -> int:
    return max(1, num_rows - max(1, num_rows // 4))


@dataclass(slots=True)
class PromptPlace:
    """Where the choices of one prompt run: they share it, so that one replica computes the prompt for all of them."""

    replica_id: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the choice that asks where


@dataclass(slots=True)
class RouteInfo:
    """`place` is given to EngineClient.generate; it fills in who serves the request before the first output."""

    replica_id: str | None = None
    place: PromptPlace = field(default_factory=PromptPlace)
    extra: dict[str, str] = field(default_factory=dict)
    record: GenerationRecord | None = None  # what the request's log line and spans are made of


@dataclass(slots=True, frozen=True)
class ReplicaAnswer:
    """What one replica says to a control call (app/engine/control)."""

    replica_id: str  # empty for one that did not answer at all
    result: Any = None
    error: MantaError | None = None


class Named(Protocol):
    """A model, as far as an operator's routes know it."""

    @property
    def name(self) -> str:
        """What requests call it."""


class EngineClient(Protocol):
    """Asynchronous access to the engines of all models."""

    models: dict[str, ServedModel]  # by name and by alias

    def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncIterator[EngineOutput]:
        """Stream the request's outputs; the last has a finish_reason. Closing the iterator early aborts the request.

        Raises EngineDeadError when the engine dies on the way, InvalidRequestError / PromptTooLongError when the
        engine refuses the request, OverloadedError when it is full.
        """
        ...

    async def is_healthy(self) -> bool:
        """True only if every served model has a replica that can make progress."""
        ...

    async def metrics_text(self) -> str:
        """The Prometheus exposition of all replicas and of this ingress, under vLLM's names."""
        ...
