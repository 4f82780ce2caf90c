"""The router's index: which replica has which KV block, and in which tier; fed by KV events, asked once per request.

One dict entry per block: hash -> a bit mask with three bits per replica (device, host; a state is kept behind it). A
prompt is looked up block by
block from its start and every replica is followed at once by one AND per block, until no replica has all blocks so
far. Chains are prefix-closed only as long as nothing is evicted from their middle, which LRU pools with shared blocks
do not promise; so depths are walked, not bisected (0.3 us a block). Where a replica's layers keep states, a prefix ends
at the last block within that depth behind which it keeps one.

Bounds. The entries are spread over 256 dicts by hash, so no single resize or sweep is long; each keeps at most its
share of `max_blocks`, the least recently stored or dispatched ones leave first. A replica is dropped by forgetting its
bits in O(1); they are swept out of the dicts one dict at a time, before they are given to another replica.

Speculative entries say what a dispatched request is about to store, so that a burst of siblings lands together. They
live in two generations of dicts and vanish with them: at the least half of `speculative_life_s`, at most all of it.

Pure: no Ray, no clock (`now` is any monotonic count of seconds), one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

from app.records.kv_events import TIERS, KVEventBatch, KVTier

NUM_SHARDS = 256
EVICTED_SHARE = 16  # a full dict gives up this fraction of its entries at once: taking one at a time is quadratic
MAX_EARLY_BATCHES = 64  # kept for one replica while an earlier one is missing
MAX_GONE = 4096  # dropped replicas whose late batches are recognised
MAX_INTERNED = 1 << 16
MAX_SPECULATIVE = 1 << 17  # blocks in one generation
PLANES: dict[KVTier, int] = {tier: plane for plane, tier in enumerate(TIERS)}  # bits of a replica in each mask
WIDTH = len(TIERS)
STATE = PLANES["state"]
WASTE_PER_BATCH = 64  # entries of an ended generation that go with each batch of events

Outcome = Literal["applied", "stale", "gap"]


class PrefixMatch(NamedTuple):
    """Counts how much of a prompt one replica has: leading blocks on the device, then further ones in either tier."""

    device_blocks: int
    host_blocks: int = 0


@dataclass(slots=True)
class _Replica:
    slot: int  # its bits in each mask begin at WIDTH * slot
    incarnation: str
    next_sequence: int = 0
    synced: bool = False  # no batch is missing
    num_blocks: int = 0  # entries with one of its bits, tiers counted apart
    early: dict[int, KVEventBatch] = field(default_factory=dict)


class PrefixIndex:
    """All replicas of one model. `max_blocks` caps the entries; see the head of this file."""

    def __init__(self, max_blocks: int = 10_000_000, speculative_life_s: float = 4.0) -> None:
        self.max_blocks = max_blocks
        self.num_evicted = 0  # entries given up because of the cap
        self._most_per_shard = max(1, max_blocks // NUM_SHARDS)
        self._most_speculative = min(max(1024, max_blocks // 16), MAX_SPECULATIVE)
        self._shards: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        self._replicas: dict[str, _Replica] = {}
        self._names: list[str] = []  # by slot
        self._free_slots: list[int] = []
        self._dead = 0  # bits of dropped replicas that may still be in some mask
        self._sweeping = 0  # those of them that the present round takes out
        self._sweep_position = 0
        self._live = 0  # device bits of the known replicas
        self._stateful = 0  # device bits of those replicas whose layers keep states
        self._has_host = False
        self._gone: OrderedDict[str, str] = OrderedDict()  # dropped replica -> its incarnation
        self._interned: dict[int, int] = {}
        self._half_life_s = speculative_life_s / 2
        self._generation_began = 0.0
        self._newer_slots: list[int] = []  # swept, but perhaps in a mask of the newer generation
        self._older_slots: list[int] = []
        self._newer: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}
        self._waste: dict[bytes, int] = {}

    # ---- what it holds

    def __len__(self) -> int:
        """Blocks with an entry; at most `max_blocks` (or 256, where that is more)."""
        return sum(map(len, self._shards))

    @property
    def num_speculative(self) -> int:
        """Speculative entries, of which some may be confirmed by now."""
        return len(self._newer) + len(self._older)

    def replicas(self) -> list[str]:
        """The replicas it knows."""
        return list(self._replicas)

    def is_synced(self, replica_id: str) -> bool:
        """True if the index has all that this replica has announced."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.synced

    def num_blocks(self, replica_id: str) -> int:
        """Cached blocks of a replica, both tiers; 0 for an unknown one."""
        replica = self._replicas.get(replica_id)
        return replica.num_blocks if replica is not None else 0

    # ---- events

    def apply(self, batch: KVEventBatch) -> Outcome:
        """Take a batch or a snapshot, in whatever order they come.

        `gap`: batches before it are missing (it is kept for a while); send a snapshot. `stale`: known already, or of an
        earlier incarnation or a dropped replica; nothing has changed. Only a snapshot brings a dropped replica back.
        """
        self._sweep_one()
        self._throw_away(WASTE_PER_BATCH)
        replica = self._replicas.get(batch.replica_id)
        if replica is not None and batch.incarnation < replica.incarnation:
            return "stale"
        if batch.is_snapshot:
            return self._restart(batch, replica)
        if replica is None or replica.incarnation != batch.incarnation:
            if replica is None and self._gone.get(batch.replica_id, "") >= batch.incarnation:
                return "stale"
            replica = self._join(batch.replica_id, batch.incarnation)
        if batch.sequence < replica.next_sequence:
            return "stale"
        if batch.sequence > replica.next_sequence:
            replica.synced = False
            if len(replica.early) < MAX_EARLY_BATCHES:
                replica.early[batch.sequence] = batch
            return "gap"
        replica.early[batch.sequence] = batch
        return self._catch_up(batch.replica_id)

    def drop(self, replica_id: str) -> None:
        """The replica is gone, and all that it had. O(1)."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        self._forget(replica_id)
        self._gone[replica_id] = replica.incarnation
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _restart(self, batch: KVEventBatch, known: _Replica | None) -> Outcome:
        same = known is not None and known.incarnation == batch.incarnation
        if same and known is not None and batch.sequence + 1 < known.next_sequence:
            return "stale"
        early = known.early if same and known is not None else {}
        self._gone.pop(batch.replica_id, None)
        replica = self._join(batch.replica_id, batch.incarnation)
        self._take(replica, batch)
        replica.next_sequence = batch.sequence + 1
        replica.early = {sequence: kept for sequence, kept in early.items() if sequence > batch.sequence}
        return self._catch_up(batch.replica_id)

    def _catch_up(self, replica_id: str) -> Outcome:
        """Apply the batches that are next in turn."""
        replica = self._replicas[replica_id]
        while (batch := replica.early.pop(replica.next_sequence, None)) is not None:
            self._take(replica, batch)
            replica.next_sequence += 1
        replica.synced = not replica.early
        return "applied"

    def _take(self, replica: _Replica, batch: KVEventBatch) -> None:
        for event in batch.events:
            bit = 1 << (WIDTH * replica.slot + PLANES[event.tier])
            self._has_host = self._has_host or event.tier == "host"
            if event.tier == "state":
                self._stateful |= 1 << WIDTH * replica.slot
            if event.kind == "stored":
                for block_hash in event.split():
                    self._store(replica, bit, block_hash)
            else:
                for block_hash in event.split():
                    self._remove(replica, bit, block_hash)

    def _store(self, replica: _Replica, bit: int, block_hash: bytes) -> None:
        shard = self._shards[hash(block_hash) >> 48 & 255]
        holders = shard.get(block_hash, 0)
        if holders & bit:
            return
        replica.num_blocks += not _is_state(bit)
        shard[block_hash] = self._shared(holders | bit) if holders else bit
        if len(shard) > self._most_per_shard:
            self._evict(shard)

    def _remove(self, replica: _Replica, bit: int, block_hash: bytes) -> None:
        shard = self._shards[hash(block_hash) >> 48 & 255]
        holders = shard.get(block_hash, 0)
        if not holders & bit:
            return
        replica.num_blocks -= not _is_state(bit)
        holders &= ~bit
        if holders & ~self._dead:
            shard[block_hash] = self._shared(holders)
        else:
            del shard[block_hash]

    def _shared(self, holders: int) -> int:
        """One object for equal masks: neighbouring blocks mostly have the same holders."""
        if len(self._interned) > MAX_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(holders, holders)

    def _evict(self, shard: dict[bytes, int]) -> None:
        """Make room: the entries at the front of a dict are the oldest."""
        count = max(1, self._most_per_shard // EVICTED_SHARE)
        for block_hash in list(islice(shard, count)):
            holders = shard.pop(block_hash) & ~self._dead
            for bit in _bits(holders):
                self._replicas[self._names[bit // WIDTH]].num_blocks -= bit % WIDTH != STATE
        self.num_evicted += count

    # ---- slots

    def _join(self, replica_id: str, incarnation: str) -> _Replica:
        """Start a replica with an empty cache, whatever was known of it."""
        if replica_id in self._replicas:
            self._forget(replica_id)
        if self._free_slots:
            slot = self._free_slots.pop()
            self._names[slot] = replica_id
        else:
            slot = len(self._names)
            self._names.append(replica_id)
        self._live |= 1 << WIDTH * slot
        replica = self._replicas[replica_id] = _Replica(slot, incarnation)
        return replica

    def _forget(self, replica_id: str) -> None:
        slot = self._replicas.pop(replica_id).slot
        self._dead |= ((1 << WIDTH) - 1) << WIDTH * slot
        self._live &= ~(1 << WIDTH * slot)
        self._stateful &= ~(1 << WIDTH * slot)

    def _sweep_one(self) -> None:
        """Take the dead bits out of one dict; after all dicts and two generations, the slots may be used again."""
        if not self._dead:
            return
        if self._sweep_position == 0:
            self._sweeping = self._dead
        dead = self._sweeping
        shard = self._shards[self._sweep_position]
        for block_hash, holders in [(h, m) for h, m in shard.items() if m & dead]:
            if left := holders & ~dead:
                shard[block_hash] = left
            else:
                del shard[block_hash]
        self._sweep_position = (self._sweep_position + 1) % NUM_SHARDS
        if self._sweep_position == 0:
            self._dead &= ~dead
            self._newer_slots += [bit // WIDTH for bit in _bits(dead) if bit % WIDTH == 0]

    # ---- requests

    def match(self, block_hashes: Sequence[bytes], now: float) -> dict[str, PrefixMatch]:
        """The longest known prefix of a chain of block hashes, for each replica that has its first block."""
        self._age(now)
        depths = self._depths(block_hashes, fold_host=False)
        reach = self._depths(block_hashes, fold_host=True) if self._has_host else depths
        if self._stateful:
            reach = self._behind_states(block_hashes, reach)
        matched = ((slot, depth, min(depth, depths.get(slot, 0))) for slot, depth in reach.items())
        return {self._names[slot]: PrefixMatch(device, depth - device) for slot, depth, device in matched}

    def _behind_states(self, block_hashes: Sequence[bytes], reach: dict[int, int]) -> dict[int, int]:
        """The depths, cut to where a state is kept or expected, of replicas whose layers keep any."""
        found = {slot: depth for slot, depth in reach.items() if not self._stateful >> WIDTH * slot & 1}
        left = sum(1 << WIDTH * slot for slot in reach if slot not in found)
        for depth in range(max(reach.values(), default=0), 0, -1):
            if not left:
                break
            name = block_hashes[depth - 1]
            holders = self._shards[hash(name) >> 48 & 255].get(name, 0)
            holders |= self._newer.get(name, 0) | self._older.get(name, 0)
            for bit in _bits(left & holders >> STATE):
                if reach[bit // WIDTH] >= depth:
                    found[bit // WIDTH] = depth
                    left ^= 1 << bit
        return found

    def _depths(self, block_hashes: Sequence[bytes], fold_host: bool) -> dict[int, int]:
        """Leading blocks by slot; with `fold_host`, a block may be in either tier."""
        found: dict[int, int] = {}
        shards, newer, older = self._shards, self._newer, self._older
        alive = self._live
        for depth, block_hash in enumerate(block_hashes):
            holders = shards[hash(block_hash) >> 48 & 255].get(block_hash, 0)
            if fold_host:
                holders |= holders >> 1
            still = alive & holders
            if still != alive and (newer or older):  # else speculation cannot add to it
                still |= alive & (newer.get(block_hash, 0) | older.get(block_hash, 0))
            if still != alive:
                if depth:
                    for bit in _bits(alive ^ still):
                        found[bit // WIDTH] = depth
                alive = still
                if not alive:
                    return found
        if block_hashes:
            for bit in _bits(alive):
                found[bit // WIDTH] = len(block_hashes)
        return found

    def expect_blocks(
        self, replica_id: str, block_hashes: Sequence[bytes], now: float, known: int = 0, num_to_state: int = 0
    ) -> None:
        """Expect these blocks on the device of a replica soon: a request with this prompt was sent to it.

        `known`: how many of them it has there already, according to `match`. Behind `num_to_state` of them it will
        leave a state, if its layers keep any.
        """
        self._age(now)
        replica = self._replicas.get(replica_id)
        if replica is None:
            if replica_id in self._gone:
                return
            replica = self._join(replica_id, "")  # none of its events has arrived yet; any incarnation supersedes ""
        bit = 1 << WIDTH * replica.slot
        newer, older, shards, touch_above = self._newer, self._older, self._shards, self._most_per_shard // 2
        for depth, block_hash in enumerate(block_hashes):
            shard = shards[hash(block_hash) >> 48 & 255]
            if len(shard) > touch_above and (holders := shard.pop(block_hash, 0)):
                shard[block_hash] = holders  # recently used
            # What is known is confirmed, or was expected before: then it is expected for longer.
            if depth < known and (not older.get(block_hash, 0) & bit or shard.get(block_hash, 0) & bit):
                continue
            others = newer.get(block_hash)
            newer[block_hash] = bit if others is None else self._shared(others | bit)
        if self._stateful & bit and 0 < num_to_state <= len(block_hashes):
            name = block_hashes[num_to_state - 1]
            newer[name] = self._shared(newer.get(name, 0) | bit << STATE)
        self._throw_away(2 * len(block_hashes))
        if len(newer) > self._most_speculative:
            self._turn(now)

    def _age(self, now: float) -> None:
        if now - self._generation_began >= self._half_life_s:
            if now - self._generation_began >= 2 * self._half_life_s:
                self._turn(now)
            self._turn(now)

    def _turn(self, now: float) -> None:
        self._free_slots += self._older_slots
        self._older_slots, self._newer_slots = self._newer_slots, []
        self._waste = self._older
        self._older, self._newer = self._newer, {}
        self._generation_began = now

    def _throw_away(self, count: int) -> None:
        """Part of a generation that has ended: to free 100,000 entries at once takes 10 ms."""
        for _ in range(min(count, len(self._waste))):
            self._waste.popitem()


def _is_state(bit: int) -> bool:
    return (bit.bit_length() - 1) % WIDTH == STATE


def _bits(mask: int) -> list[int]:
    """Positions of the bits that are set."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found
