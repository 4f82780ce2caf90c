"""Keeps what tenants leave on the server for later: responses, files, batches.

An entry belongs to the tenant that made it; nobody else finds it. It has a header, which is replaced whole, and chunks,
which are only ever appended. Whoever works on an entry owns it under a lease: nobody else appends, it is not evicted,
and an entry whose owner has died is known by its lease.

A store is bounded in entries and bytes. One that evicts makes room at the cost of the tenant that holds most, so no
tenant can drive out another that holds less; one that does not evict refuses what does not fit.

A call costs a logarithm of what is kept, beside what it returns, what it evicts, and what is being worked on: the store
has each order that it asks for (order.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from app.api.store.entries import (
    NO_LEASE,
    PLAIN,
    Birth,
    Lease,
    Seen,
    StorageFullError,
    StoreConflictError,
    Stored,
    StoreLimits,
    Tail,
)
from app.api.store.kept_entry import KeptEntry, TenantEntries, check_seen, is_repeated
from app.api.store.order import Ages, Dues, Largest
from app.errors import OverloadedError

READ_CHUNKS = 1 << 16  # most chunks that one call reads


class LocalStore:
    """The entries of one kind, synchronously."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._tenants: dict[str, TenantEntries] = {}
        self._num_entries = self._num_bytes = self._num_created = 0
        self._under_way: dict[tuple[str, str], KeptEntry] = {}
        self._dues = Dues(self._expires_at, self.__len__)
        self._by_entries, self._by_bytes = Largest(self._entries_of), Largest(self._bytes_of)

    def __len__(self) -> int:
        return self._num_entries

    def put(
        self,
        tenant: str,
        key: str,
        header: bytes,
        *,
        append: Sequence[bytes] = (),
        seen: Seen | None = None,
        lease: Lease = NO_LEASE,
        expires_s: float | None = None,
        born: Birth = PLAIN,
    ) -> int:
        """Write an entry's header and append chunks; its new version. It must still be as it was `seen`; without a
        `lease` it is nobody's afterwards. `born` counts for a new entry.

        What names what was seen may be asked again by who does not know whether it was done. StoreConflictError,
        StorageFullError, or OverloadedError for a new entry where `born.max_owned` of the tenant are worked on.
        """
        self._sweep()
        entry = self._find(tenant, key)
        if entry is not None and is_repeated(entry, header, append, seen, lease.owner):
            entry.lease_until = self._clock() + lease.seconds
            return entry.version
        check_seen(key, entry, seen)
        if entry is None and born.max_owned is not None:
            self._check_owned(tenant, born.max_owned)
        grown = len(header) - (len(entry.header) if entry is not None else 0) + sum(map(len, append))
        self._make_room(tenant, int(entry is None), grown, key)
        if entry is None:
            self._num_created += 1
            entry = KeptEntry(b"", self._num_created, previous=born.previous, label=born.label)
            self._add(tenant, key, entry)
        now = self._clock()
        entry.header = header
        self._own(tenant, key, entry, lease.owner, now + lease.seconds)
        if expires_s is not None:
            entry.expires_at = now + expires_s
            self._dues.add(entry.expires_at, tenant, key)
        entry.version += 1
        self._grow(tenant, entry, append, grown)
        return entry.version

    def append(self, tenant: str, key: str, chunks: Sequence[bytes], owner: str, at: int | None = None) -> int:
        """Add chunks to an entry of `owner`; how many it has then. StoreConflictError or StorageFullError.

        `at`: the first of them has this number. Then it may be asked again by who does not know whether it was done.
        """
        entry = self._owned(tenant, key, owner)
        if at is not None and at != len(entry.chunks):
            if entry.chunks[at:] == list(chunks):
                return len(entry.chunks)
            raise StoreConflictError(f"{key} has {len(entry.chunks)} chunks, not {at}")
        grown = sum(map(len, chunks))
        self._make_room(tenant, 0, grown, key)
        self._grow(tenant, entry, chunks, grown)
        return len(entry.chunks)

    def join(
        self,
        tenant: str,
        key: str,
        header: bytes,
        parts: Sequence[str],
        owner: str,
        *,
        expires_s: float | None = None,
        born: Birth = PLAIN,
    ) -> int:
        """Make an entry of the chunks of `parts` in their order, entries of `owner`, which are then gone; its version.

        Where there is such an entry it was done before. StoreConflictError where a part is gone or another's.
        """
        made = self._find(tenant, key)
        if made is not None:
            return made.version
        chunks = [chunk for part in parts for chunk in self._owned(tenant, part, owner).chunks]
        self._make_room(tenant, 1, len(header), "")  # that of the parts is given back first
        for part in parts:
            self.delete(tenant, part)
        return self.put(tenant, key, header, append=chunks, expires_s=expires_s, born=born)

    def renew(self, tenant: str, key: str, owner: str, lease_s: float) -> int:
        """Prolong the lease of `owner`; the entry's version. StoreConflictError when it is another's by now."""
        entry = self._owned(tenant, key, owner)
        entry.lease_until = self._clock() + lease_s
        return entry.version

    def take(self, tenant: str, key: str, owner: str, lease_s: float) -> Stored | None:
        """Make `owner` the owner, whoever was it; None when there is no such entry."""
        entry = self._find(tenant, key)
        if entry is None:
            return None
        self._give(tenant, key, entry, owner, lease_s)
        return self._stored(key, entry)

    def claim(self, owner: str, lease_s: float) -> tuple[str, Stored] | None:
        """Take an entry whose owner's lease has run out; its tenant and the entry, None where there is none."""
        now = self._clock()
        for (name, key), entry in self._under_way.items():
            if not entry.is_held(now):
                self._give(name, key, entry, owner, lease_s)
                return name, self._stored(key, entry)
        return None

    def get(self, tenant: str, key: str) -> Stored | None:
        """One entry; None when it is not kept."""
        entry = self._find(tenant, key)
        return None if entry is None else self._stored(key, entry)

    def read(self, tenant: str, key: str, start: int, max_bytes: int) -> list[bytes] | None:
        """Chunks from number `start` on: one, and more while all have at most `max_bytes`. None: it is not kept."""
        entry = self._find(tenant, key)
        if entry is None:
            return None
        found: list[bytes] = []
        for chunk in entry.chunks[start : start + READ_CHUNKS]:
            max_bytes -= len(chunk)
            if found and max_bytes < 0:
                break
            found.append(chunk)
        return found

    def tail(self, tenant: str, key: str, start: int, max_bytes: int) -> Tail | None:
        """The same chunks, and whether more are to be expected."""
        chunks = self.read(tenant, key, start, max_bytes)
        if chunks is None:
            return None
        entry = self._tenants[tenant].entries[key]
        return Tail(chunks, bool(entry.owner), bool(entry.owner) and not entry.is_held(self._clock()))

    def chain(self, tenant: str, key: str, max_entries: int, max_bytes: int) -> list[tuple[Stored, bytes]]:
        """The entry and those before it, the oldest first, each with its first chunk; all count as used now.

        [] when it, or one before it, is not kept. Where there are more than allowed, the oldest are missing: then the
        first one found names a previous one.
        """
        found: list[tuple[Stored, bytes]] = []
        wanted: str | None = key
        while wanted is not None and len(found) < max_entries and max_bytes >= 0:
            entry = self._find(tenant, wanted)
            if entry is None:
                return []
            first = entry.chunks[0] if entry.chunks else b""
            max_bytes -= len(entry.header) + len(first)
            found.append((self._stored(wanted, entry), first))
            wanted = entry.previous
        for stored, _ in found:
            self._tenants[tenant].entries.move_to_end(stored.key)
        return found[::-1]

    def page(
        self,
        tenant: str,
        after: str | None,
        limit: int,
        newest_first: bool,
        label: str = "",
        only_finished: bool = False,
    ) -> list[Stored]:
        """At most `limit` entries of a label in the order of their making, those after `after`; StoreConflictError
        when that one is not kept, or of another label. `only_finished`: those that nobody works on."""
        self._sweep()
        found = self._tenants.get(tenant, TenantEntries())
        entries = found.entries
        if after is not None and (after not in entries or label not in ("", entries[after].label)):
            raise StoreConflictError(f"{after} is not kept")
        bound = entries[after].created if after is not None else None
        page: list[Stored] = []
        for made, key in found.ages[label].walk(bound, newest_first) if label in found.ages else ():
            if len(page) == limit:
                break
            entry = entries.get(key)
            if entry is not None and entry.created == made and not (only_finished and entry.owner):
                page.append(self._stored(key, entry))
        return page

    def size(self) -> tuple[int, int]:
        """The number of entries, and their bytes."""
        self._sweep()
        return self._num_entries, self._num_bytes

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """StorageFullError where a new entry of so many bytes finds no room; one that evicts makes it."""
        self._sweep()
        self._make_room(tenant, 1, num_bytes, "")

    def delete(self, tenant: str, key: str) -> bool:
        """Forget an entry; False when it was not kept."""
        found = self._tenants.get(tenant)
        entry = found.entries.pop(key, None) if found is not None else None
        if found is None or entry is None:
            return False
        found.num_bytes -= entry.num_bytes
        self._num_bytes -= entry.num_bytes
        self._num_entries -= 1
        self._own(tenant, key, entry, "", 0.0)
        for label in {"", entry.label}:
            found.ages[label].count_gone(lambda key, made: key in found.entries and found.entries[key].created == made)
            if not found.ages[label]:
                del found.ages[label]
        if not found.entries:
            del self._tenants[tenant]
        self._has_changed(tenant)
        return True

    def _add(self, tenant: str, key: str, entry: KeptEntry) -> None:
        found = self._tenants.setdefault(tenant, TenantEntries())
        found.entries[key] = entry
        self._num_entries += 1
        for label in {"", entry.label}:
            found.ages.setdefault(label, Ages()).add(entry.created, key)

    def _own(self, tenant: str, key: str, entry: KeptEntry, owner: str, until: float) -> None:
        entry.owner, entry.lease_until = owner, until
        owned = self._tenants[tenant].owned
        if owner:
            owned[key] = self._under_way[tenant, key] = entry
        else:
            owned.pop(key, None)
            self._under_way.pop((tenant, key), None)

    def _has_changed(self, tenant: str) -> None:
        self._by_entries.refresh(tenant)
        self._by_bytes.refresh(tenant)

    def _entries_of(self, tenant: str) -> int | None:
        return len(self._tenants[tenant].entries) if tenant in self._tenants else None

    def _bytes_of(self, tenant: str) -> int | None:
        return self._tenants[tenant].num_bytes if tenant in self._tenants else None

    def _expires_at(self, tenant: str, key: str, when: float) -> bool:
        found = self._tenants.get(tenant)
        entry = found.entries.get(key) if found is not None else None
        return entry is not None and entry.expires_at == when

    def _check_owned(self, tenant: str, most: int) -> None:
        found = self._tenants.get(tenant)
        owned, now = found.owned.values() if found is not None else (), self._clock()
        # A lost one that is kept will be gone on with; any other one runs no more.
        keeps_lost = self._limits.keeps_lost
        number = len(owned) if keeps_lost else sum(entry.is_held(now) for entry in owned)
        if number >= most:
            raise OverloadedError(f"{number} of yours are under way; at most {most}")

    def _find(self, tenant: str, key: str) -> KeptEntry | None:
        entries = self._tenants[tenant].entries if tenant in self._tenants else {}
        entry = entries.get(key)
        if entry is not None and entry.expires_at is not None and entry.expires_at <= self._clock():
            self.delete(tenant, key)
            return None
        return entry

    def _owned(self, tenant: str, key: str, owner: str) -> KeptEntry:
        entry = self._find(tenant, key)
        if entry is None or entry.owner != owner:
            raise StoreConflictError(f"{key} is gone, or somebody else's by now")
        return entry

    def _give(self, tenant: str, key: str, entry: KeptEntry, owner: str, lease_s: float) -> None:
        self._own(tenant, key, entry, owner, self._clock() + lease_s)
        entry.version += 1

    def _stored(self, key: str, entry: KeptEntry) -> Stored:
        is_lost = bool(entry.owner) and not entry.is_held(self._clock())
        counts = (entry.version, len(entry.chunks), entry.num_bytes)
        return Stored(key, entry.header, *counts, entry.previous, entry.owner, is_lost)

    def _grow(self, tenant: str, entry: KeptEntry, chunks: Sequence[bytes], num_bytes: int) -> None:
        entry.chunks += chunks
        entry.num_bytes += num_bytes
        self._tenants[tenant].num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._has_changed(tenant)

    def _make_room(self, tenant: str, num_entries: int, num_bytes: int, key: str) -> None:
        """Room for so much more of a tenant's, at the cost of anything but the entry `key` that grows."""
        limits = self._limits
        entry = self._find(tenant, key)
        size = num_bytes + (entry.num_bytes if entry is not None else 0)
        fits = size <= min(limits.max_bytes, limits.max_tenant_bytes)  # else nothing is forgotten for it
        while True:
            own = self._tenants.get(tenant) or TenantEntries()
            own_count, own_bytes = len(own.entries) + num_entries, own.num_bytes + num_bytes
            if own_count > limits.max_tenant_entries or own_bytes > limits.max_tenant_bytes:
                victims = iter((tenant,))
            elif self._num_entries + num_entries > limits.max_entries:
                victims = self._largest(tenant, own_count, self._by_entries)
            elif self._num_bytes + num_bytes > limits.max_bytes:
                victims = self._largest(tenant, own_bytes, self._by_bytes)
            else:
                return
            if not limits.evicts or not fits or not any(self._evict(name, key) for name in victims):
                raise StorageFullError(
                    f"no room: {self._num_entries} entries with {self._num_bytes} bytes are kept, of them "
                    f"{len(own.entries)} with {own.num_bytes} bytes of yours; delete some, or let them expire"
                )

    def _largest(self, tenant: str, wanted: int, order: Largest) -> Iterator[str]:
        """Tenants by what they hold, the largest first; `tenant`, who would hold `wanted`, before an equal one."""
        is_named = False
        for size, name in order.descending():
            if not is_named and wanted >= size:
                is_named = True
                yield tenant
            if name != tenant:
                yield name
        if not is_named:
            yield tenant

    def _evict(self, tenant: str, but: str) -> bool:
        """Forget what a tenant did not use for longest and nobody works on; False when there is nothing such."""
        found, now = self._tenants.get(tenant), self._clock()
        entries = found.entries if found is not None else {}
        keeps_lost = self._limits.keeps_lost
        idle = (key for key, entry in entries.items() if not (entry.owner if keeps_lost else entry.is_held(now)))
        oldest = next((key for key in idle if key != but), None)
        return oldest is not None and self.delete(tenant, oldest)

    def _sweep(self) -> None:
        """Forget what has expired."""
        for tenant, key in self._dues.until(self._clock()):
            self.delete(tenant, key)
