"""Says what a request brings for the worker's feature of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class AdapterAsk:
    """The adapter that a request is answered with. Its digest is its identity: a name may mean another one later."""

    name: str  # for people
    digest: bytes
