"""The adapters of one engine: which are loaded, and which names they have.

A name may be given to another adapter, or taken away, while requests run: those go on with the one that they began
with, which stays loaded until the last of them has ended.
"""

from __future__ import annotations

from app.records.adapter import KnownAdapter


class AdapterBook:
    """Written between steps; read from any thread."""

    def __init__(self) -> None:
        self.loaded: frozenset[bytes] = frozenset()  # digests that requests may ask for
        self.known: tuple[KnownAdapter, ...] = ()  # those that have a name, the oldest first
        self.nameless: frozenset[bytes] = frozenset()  # those that stay for running requests only

    def name(self, adapter: KnownAdapter) -> None:
        """The adapter is loaded, and has its name from now on."""
        others = [other for other in self.known if other.name != adapter.name]
        self.known = (*others, adapter)
        self.loaded |= {bytes.fromhex(adapter.digest)}
        self._count()

    def has(self, name: str, digest: bytes) -> bool:
        """True if the adapter has this name already."""
        return any(one.name == name and bytes.fromhex(one.digest) == digest for one in self.known)

    def forget(self, name: str) -> bool:
        """The name means nothing any more; False where it did not."""
        known = tuple(other for other in self.known if other.name != name)
        is_known, self.known = len(known) < len(self.known), known
        self._count()
        return is_known

    def drop(self, digest: bytes) -> None:
        """It is loaded no longer."""
        self.loaded -= {digest}
        self._count()

    def _count(self) -> None:
        self.nameless = self.loaded - {bytes.fromhex(one.digest) for one in self.known}
