"""KV-cache blocks as a resource: who holds each block, which ones are free, which ones can be found by hash.

Invariants: a block is held (ref count > 0), or free and in exactly one of two free lists: `_blank` (no hash) or
`_evictable` (hash kept, least recently used first). A hash maps to one block and that block has this hash. A block
freed while a step message that may still write it is in flight stays out of the free lists until that step message has
returned (I2). Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from app.records.block_residency import BlockResidency
from app.records.kv_events import KVEventSink

BlockHook = Callable[[list[bytes], list[int]], None]  # hashes, and the blocks that have them


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and takes them back."""

    def __init__(
        self,
        num_blocks: int,
        sink: KVEventSink | None = None,
        on_evict: BlockHook | None = None,
        on_register: BlockHook | None = None,
    ) -> None:
        """`on_evict` hears of cached blocks about to be handed out; their content is there until the next step message.
        `on_register` hears of those that can be found from now on."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.sink = sink
        self.residency = BlockResidency(num_blocks)
        self._on_evict = on_evict
        self._on_register = on_register
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._deferred: dict[int, list[int]] = {}  # step id -> blocks that become free when that step returned
        self.num_deferred = 0

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out now; cached ones that nobody holds count."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by hash."""
        return len(self._by_hash)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with ref count 1, evicting the least recently used cached ones when needed."""
        assert count <= self.num_free, "the caller asks num_free first"
        blank = self._blank
        from_blank = min(count, len(blank))
        taken = blank[len(blank) - from_blank :]
        del blank[len(blank) - from_blank :]
        if from_blank < count:
            taken += self._evict(count - from_blank)
        for block in taken:
            self._ref_counts[block] = 1
        if not self.residency.watched.isdisjoint(taken):
            self.residency.note_taken(taken)
        return taken

    def _evict(self, count: int) -> list[int]:
        evicted = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        removed: list[bytes] = []
        for block in evicted:
            block_hash = self._hashes[block]
            assert block_hash is not None
            del self._by_hash[block_hash]
            self._hashes[block] = None
            removed.append(block_hash)
        if not self.residency.watched.isdisjoint(evicted):
            self.residency.note_eviction(evicted)
        if self.sink is not None:
            self.sink.report_removed(removed)
        if self._on_evict is not None:
            self._on_evict(removed, evicted)
        return evicted

    def forget(self) -> None:
        """No block can be found by hash any more; who holds blocks keeps them."""
        forgotten = list(self._by_hash)
        for block in self._by_hash.values():
            self._hashes[block] = None
        self._by_hash.clear()
        self._blank += self._evictable
        self._evictable.clear()
        if self.sink is not None and forgotten:
            self.sink.report_removed(forgotten)

    def find(self, block_hash: bytes) -> int | None:
        """The block cached under `block_hash`, held or not."""
        return self._by_hash.get(block_hash)

    def is_held(self, block: int) -> bool:
        """True if any request holds `block`."""
        return self._ref_counts[block] > 0

    def touch(self, blocks: Collection[int]) -> None:
        """One more holder for each of these cached blocks."""
        if not self.residency.watched.isdisjoint(blocks):
            self.residency.note_reuse(blocks)
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def evict_first(self, blocks: Iterable[int]) -> None:
        """Those of these cached blocks that nobody holds are the next to be evicted."""
        for block in blocks:
            if block in self._evictable:
                self._evictable.move_to_end(block, last=False)

    def register(self, parent: bytes, blocks: list[int], hashes: list[bytes]) -> None:
        """Make held, fully computed blocks findable. Of two blocks with the same content the first one stays."""
        stored_parent, stored = parent, []
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert self._ref_counts[block] > 0
            if self._hashes[block] is None and block_hash not in self._by_hash:
                self._hashes[block] = block_hash
                self._by_hash[block_hash] = block
                stored.append(block_hash)
            else:
                self._announce(stored_parent, stored)
                stored_parent, stored = block_hash, []
        self._announce(stored_parent, stored)

    def unregister(self, blocks: Iterable[int]) -> None:
        """These cached blocks, which nobody holds, are of no use: they are handed out first, and `on_evict` does not
        hear of them."""
        blocks, removed = list(blocks), []
        for block in blocks:
            block_hash = self._hashes[block]
            assert block_hash is not None
            del self._evictable[block], self._by_hash[block_hash]
            self._hashes[block] = None
            self._blank.append(block)
            removed.append(block_hash)
        if not self.residency.watched.isdisjoint(blocks):
            self.residency.note_eviction(blocks)
        if self.sink is not None and removed:
            self.sink.report_removed(removed)

    def _announce(self, parent: bytes, stored: list[bytes]) -> None:
        if self.sink is not None and stored:
            self.sink.report_stored(parent, stored)
        if self._on_register is not None and stored:
            self._on_register(stored, [self._by_hash[block_hash] for block_hash in stored])

    def free(self, blocks: list[int], after_step: int | None = None) -> None:
        """One holder fewer for each block; `blocks` in the order of their positions.

        With `after_step`, nothing changes until `step_returned(after_step)`: a step in flight may write the blocks.
        The last positions become evictable first, so that what remains cached is a prefix.
        """
        if after_step is not None:
            self._deferred.setdefault(after_step, []).extend(blocks)
            self.num_deferred += len(blocks)
            return
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            count = self._ref_counts[block]
            assert count >= 0, f"block {block} freed twice"
            if count == 0:
                if self._hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._evictable[block] = None

    def release_until(self, step_id: int) -> None:
        """Free what waited for step message `step_id` and those before it, which have returned."""
        if not self._deferred:
            return
        for step in sorted(step for step in self._deferred if step <= step_id):
            blocks = self._deferred.pop(step)
            self.num_deferred -= len(blocks)
            self.free(blocks)

    def check(self) -> None:
        """Assert the invariants at the head of this file; for tests, O(num_blocks)."""
        blank, evictable = set(self._blank), set(self._evictable)
        assert len(blank) == len(self._blank)
        assert not blank & evictable
        for block in range(self.num_blocks):
            assert (self._ref_counts[block] == 0) == (block in blank or block in evictable), block
            assert block not in blank or self._hashes[block] is None, block
            assert block not in evictable or self._hashes[block] is not None, block
        assert {h: b for b, h in enumerate(self._hashes) if h is not None} == self._by_hash
        assert self.num_deferred == sum(map(len, self._deferred.values()))
