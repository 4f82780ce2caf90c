"""Says what a request brings for the worker's feature of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

ROOT_BYTES = 16


class KnownAdapter(NamedTuple):
    """An adapter that an engine serves under a name."""

    name: str
    digest: str  # hex digits
    path: str  # of its directory

    @property
    def ask(self) -> AdapterAsk:
        """Returns what its requests bring."""
        return AdapterAsk(self.name, bytes.fromhex(self.digest))


@dataclass(slots=True, frozen=True)
class AdapterAsk:
    """The adapter that a request is answered with. Its digest is its identity: a name may mean another one later."""

    name: str  # for people
    digest: bytes

    def cache_root(self, root: bytes) -> bytes:
        """Returns what blocks of such requests are hashed with: no other adapter's meet them, nor the base model's
        (I5). `root`: of the tenant."""
        return blake2b(len(root).to_bytes(4, "little") + root + self.digest, digest_size=ROOT_BYTES).digest()


class AdapterState(NamedTuple):
    """Says of one engine which adapters it serves, and which its rows compute with."""

    known: tuple[KnownAdapter, ...] = ()  # those that have a name
    num_slots: int = 0  # adapters that rows may compute with; 0: none is served
    running: tuple[str, ...] = ()  # digests of those that rows compute with
    running_names: tuple[str, ...] = ()
    waiting_names: tuple[str, ...] = ()  # of requests without a row
    on_disk: tuple[str, ...] = ()  # digests of those with a name that are read again when a request asks
    read_s: float = 0.1  # that the latest reads took, about


NO_ADAPTERS = AdapterState()
