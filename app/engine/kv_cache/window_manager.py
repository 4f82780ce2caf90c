"""The KV-cache manager of a model with sliding windows: groups of layers, of which some keep their window's blocks.

A request's table has `num_groups` entries for each block of its tokens, side by side. Where a group's block has left
the window it is given back, hash and all, and its entry is NOWHERE from then on: the device may still name the old
block there, and reads neither. A block leaves once steps have returned that computed all tokens up to where the next
one no longer sees it, so no step in flight reads it either (I2).

A block is found by its hash (I5) and its group. A prefix is a hit where each group has all that the token behind it
sees: groups without a window all of the prefix, the others the window before its end. To the outside (KV events) the
first group speaks for all; it has no window, if any layer has none.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.prefix_hit import LOADED, NO_HIT, PrefixHit
from app.engine.kv_cache.running_rows import RunningRows
from app.engine.kv_connector.base import KVConnector
from app.records.block_hash import HASH_BYTES
from app.records.kv_events import KVEventSink, KVTier
from app.records.kv_groups import KVGroups
from app.records.request_state import Request

NOWHERE = 0  # the block that no request holds


class FirstGroup:
    """A KVEventSink that hears of all groups and passes on what concerns the first one."""

    def __init__(self, sink: KVEventSink) -> None:
        self._sink = sink

    def report_stored(self, parent: bytes, hashes: list[bytes], tier: KVTier = "device") -> None:
        """See KVEventSink."""
        if kept := [key for key in hashes if len(key) == HASH_BYTES]:
            self._sink.report_stored(parent, kept, tier)

    def report_removed(self, hashes: list[bytes], tier: KVTier = "device") -> None:
        """See KVEventSink."""
        if kept := [key for key in hashes if len(key) == HASH_BYTES]:
            self._sink.report_removed(kept, tier)


class WindowManager(KVCacheManager):
    """See the head of this file."""

    def __init__(
        self,
        num_blocks: int,
        groups: KVGroups,
        *,
        hash_key: bytes,
        max_tokens_in_flight: int,
        enable_prefix_caching: bool = True,
        sink: KVEventSink | None = None,
        connector: KVConnector | None = None,
    ) -> None:
        """`max_tokens_in_flight`: of all steps between their scheduling and their return. `sink` and the connector's
        are FirstGroup."""
        super().__init__(
            num_blocks,
            groups.block_size,
            hash_key=hash_key,
            enable_prefix_caching=enable_prefix_caching,
            sink=sink,
            connector=connector,
        )
        self.num_groups = len(groups.windows)
        self._groups = groups
        self._suffixes = [b"", *(bytes([group]) for group in range(1, self.num_groups))]
        # Blocks that steps in flight keep in a sliding group beside what lasts, of all requests together.
        self._num_passing = self.num_blocks_for(max_tokens_in_flight) + 1
        nowhere = self.pool.take(1)
        assert nowhere == [NOWHERE]

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can have."""
        return self.pool.num_blocks - self._groups.num_kept

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request that has all blocks to itself."""
        return self._groups.max_tokens(self.num_blocks)

    # ---- admission

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest prefix of which each group has what the token behind it sees, on the device or loadable."""
        if not self.enable_prefix_caching or request.skips_cache_read:
            return NO_HIT
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        whole = [suffix for suffix, window in self._by_group() if window is None]
        length = sum(1 for _ in takewhile(lambda h: all(self._has(h + suffix) for suffix in whole), hashes))
        if not whole:
            length = len(hashes)
        while length and (missing := self._last_missing(hashes, length)) is not None:
            length = missing  # no prefix that ends behind it is a hit, for its window holds this block too
        return self._hit(hashes[:length])

    def _last_missing(self, hashes: list[bytes], length: int) -> int | None:
        """The last of the first `length` blocks that the next token sees in a group that lacks it."""
        missing = -1
        for suffix, window in self._by_group():
            if window is None:
                continue
            for index in range(length - 1, max(missing, self._groups.first_block(window, length) - 1), -1):
                if not self._has(hashes[index] + suffix):
                    missing = index
                    break
        return missing if missing >= 0 else None

    def _hit(self, hashes: list[bytes]) -> PrefixHit:
        table, find = [NOWHERE] * (len(hashes) * self.num_groups), self.pool.find
        for group, (suffix, window) in enumerate(self._by_group()):
            for index in range(self._groups.first_block(window, len(hashes)), len(hashes)):
                block = find(hashes[index] + suffix)
                table[index * self.num_groups + group] = LOADED if block is None else block
        loads = {place // self.num_groups for place, block in enumerate(table) if block == LOADED}
        return PrefixHit(table, [block for block in table if block > NOWHERE], len(hashes), len(loads))

    def _has(self, key: bytes) -> bool:
        return self.pool.find(key) is not None or (self.connector is not None and self.connector.match([key]) == 1)

    def _by_group(self) -> zip[tuple[bytes, int | None]]:
        return zip(self._suffixes, self._groups.windows, strict=True)

    def _key(self, request: Request, place: int) -> bytes:
        index, group = divmod(place, self.num_groups)
        return request.block_hashes[index] + self._suffixes[group]

    def fits(self, num_tokens: int, hit: PrefixHit, running: RunningRows) -> bool:
        """See KVCacheManager. What chunks need in a sliding group beside what lasts is counted once for all requests;
        one that is alone needs none of it, as its chunks are cut to what there is."""
        size, alone = self.block_size, not len(running.num_tokens)
        slots = np.append(running.num_slots // size, hit.num_blocks)
        known = np.append(running.num_tokens + size - 1, num_tokens + size - 1) // size
        confirmed = np.append(running.num_confirmed // size, hit.num_blocks)
        short = np.maximum(known - slots, 0)
        needed = hit.table.count(LOADED)
        for window in self._groups.windows:
            if window is None:
                needed += int(short.sum())
                continue
            first = np.maximum(confirmed * size - window + 1, 0) // size
            spare = self._groups.num_lasting(window) - (slots - first)
            lasting = int(np.minimum(short, np.maximum(spare, 0)).sum())
            passing = np.minimum(short, np.maximum(spare + self._num_passing, 0))
            needed += lasting if alone else min(int(passing.sum()), lasting + self._num_passing)
        reserve = 0 if alone else self.pool.num_blocks // 100
        return needed + reserve <= self.num_free_after_hit(hit)

    def num_slots_after_hit(self, hit: PrefixHit) -> int:
        """See KVCacheManager; no more than steps in flight may have: the others come as blocks leave windows."""
        return min(super().num_slots_after_hit(hit), self._num_passing * self.block_size)

    # ---- steps return

    def next_publish(self, request: Request) -> int:
        """Computed tokens at which `publish` has something to do: without a prefix cache too."""
        return (request.num_published_blocks + 1) * self.block_size

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Make full blocks findable, as of the base class, and give back those that have left their windows."""
        done, full = request.num_published_blocks, num_computed_tokens // self.block_size
        if full <= done:
            return
        if self.enable_prefix_caching:
            self._hash_up_to(request, full)
            self._forget_coming(request, request.block_hashes[done:full])
            for group in range(self.num_groups):
                self._register(request, group, done, full)
        request.num_published_blocks = full
        self._give_back(request, done, full)

    def _register(self, request: Request, group: int, done: int, full: int) -> None:
        blocks = request.block_ids[done * self.num_groups + group : full * self.num_groups : self.num_groups]
        done += sum(1 for _ in takewhile(lambda block: block == NOWHERE, blocks))  # behind a hit that loads
        hashes, suffix = request.block_hashes, self._suffixes[group]
        parent = hashes[done - 1] if done else request.root_hash
        kept = blocks[len(blocks) - (full - done) :]
        self.pool.register(parent, kept, [block_hash + suffix for block_hash in hashes[done:full]])

    def _give_back(self, request: Request, done: int, full: int) -> None:
        left: list[int] = []
        for group, window in enumerate(self._groups.windows):
            first, end = (self._groups.first_block(window, count) for count in (done, full))
            places = slice(first * self.num_groups + group, end * self.num_groups, self.num_groups)
            left += (block for block in request.block_ids[places] if block != NOWHERE)
            request.block_ids[places] = [NOWHERE] * (end - first)
        self.pool.free(left)

    def free(self, request: Request, after_step: int | None) -> None:
        """Give all blocks back, as of the base class."""
        request.block_ids = [block for block in request.block_ids if block != NOWHERE]
        super().free(request, after_step)
