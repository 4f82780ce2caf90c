"""The adapters of one engine: which are loaded, which names they have, and which of those lie on disk meanwhile.

A name may be given to another adapter, or taken away, while requests run: those go on with the one that they began
with, which stays loaded until the last of them has ended.
"""

from __future__ import annotations

from collections.abc import Set

from app.records.adapter import NO_ADAPTERS, KnownAdapter

NEWEST = 0.25  # share of the newest read in their mean


class AdapterBook:
    """Written between steps; read from any thread."""

    def __init__(self) -> None:
        self.loaded: frozenset[bytes] = frozenset()  # digests of those that workers have in host memory
        self.known: tuple[KnownAdapter, ...] = ()  # those that have a name, the oldest first
        self.nameless: frozenset[bytes] = frozenset()  # those that stay for running requests only
        self.num_uses = 0  # requests that have asked for one
        self.read_s = NO_ADAPTERS.read_s  # a moving mean
        self._of_digest: dict[bytes, KnownAdapter] = {}  # of those that have a name
        self._by_use: dict[bytes, None] = {}  # of those that are loaded, the one that was asked for longest ago first

    def name(self, adapter: KnownAdapter) -> None:
        """The adapter is loaded, and has its name from now on."""
        others = [other for other in self.known if other.name != adapter.name]
        self.known = (*others, adapter)
        self._count()
        self.load(bytes.fromhex(adapter.digest))

    def of(self, digest: bytes) -> KnownAdapter | None:
        """Returns where an adapter with a name lies."""
        return self._of_digest.get(digest)

    @property
    def on_disk(self) -> tuple[str, ...]:
        """Returns the digests of those with a name that are not in host memory, in hex digits."""
        return tuple(digest.hex() for digest in self._of_digest if digest not in self.loaded)

    def note_read(self, seconds: float) -> None:
        """So long it took to bring one into host memory."""
        self.read_s += NEWEST * (seconds - self.read_s)

    def load(self, digest: bytes) -> None:
        """It is in host memory."""
        self.loaded |= {digest}
        self._by_use.pop(digest, None)
        self._by_use[digest] = None
        self._count()

    def use(self, digest: bytes) -> None:
        """A request asks for it."""
        self.num_uses += 1
        if digest in self._by_use:
            del self._by_use[digest]
            self._by_use[digest] = None

    def longest_unused(self, but: Set[bytes]) -> bytes | None:
        """Returns the adapter with a name, in host memory, that was asked for longest ago; none of `but`."""
        return next((digest for digest in self._by_use if digest in self._of_digest and digest not in but), None)

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
        """It is not in host memory any longer."""
        self.loaded -= {digest}
        self._by_use.pop(digest, None)
        self._count()

    def _count(self) -> None:
        self._of_digest = {bytes.fromhex(one.digest): one for one in self.known}
        self.nameless = self.loaded - self._of_digest.keys()
