"""The one thing the HTTP dialects need from the rest of Manta: somewhere to send token ids.

`app/api` knows neither Ray nor the engine's loop; the ingress deployment implements EngineClient over the
router and the token channels, tests implement it over an engine in the same process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.errors import MantaError
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.telemetry.request_record import GenerationRecord
from app.text.served_model import ServedModel


@dataclass(slots=True)
class PromptPlace:
    """Remembers where the choices of one prompt run: they share it, so that one replica computes the prompt for all of
    them.
    """

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
    """Holds what one replica says to a control call (app/engine/control)."""

    replica_id: str  # empty for one that did not answer at all
    result: Any = None
    error: MantaError | None = None


class Named(Protocol):
    """A model, as far as an operator's routes know it."""

    @property
    def name(self) -> str:
        """The name by which requests call it."""


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
