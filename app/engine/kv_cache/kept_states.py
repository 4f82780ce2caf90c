"""The copies of states that requests can go on from, each under the hash of the block that it stands behind (I5).

A copy lies in blocks of the pool, like a request's tokens: so states and tokens share one budget, whose border moves
with what is used, and a connector takes in what the device evicts of either. Where a rank has no blocks of tokens there
is a slot for each copy, too.

What is evicted first: states that a deeper one of the same conversation has taken the place of, and nobody else came
back to. Another one lives as long as the block behind which it stands: both are of no use alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.engine.kv_cache.block_pool import BlockPool
from app.engine.kv_cache.prefix_hit import LOADED
from app.engine.kv_cache.state_events import StateEvents
from app.engine.kv_connector.base import KVConnector
from app.records.state_pool import StatePool

NO_SLOT = -1


class StatePlace(NamedTuple):
    """Memory of one copy, held."""

    slot: int
    blocks: list[int]


@dataclass(slots=True)
class _Kept:
    slot: int
    is_shared: bool  # conversations are likely to begin alike up to here
    num_uses: int = 0
    is_superseded: bool = False


class KeptStates:
    """All of one engine."""

    def __init__(self, size: StatePool, pool: BlockPool, connector: KVConnector | None, events: StateEvents) -> None:
        self.num_blocks = size.num_blocks  # of one copy
        self._pool = pool
        self._connector = connector
        self._events = events
        self._free = None if size.num_slots is None else list(range(size.num_slots - 1, -1, -1))
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # those first that give way first, where slots are short

    def __len__(self) -> int:
        """Copies that can be found."""
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        """True if a state is kept behind the block with this hash. Roughly right from any thread."""
        return key in self._kept

    # ---- found

    def find(self, key: bytes) -> Sequence[int] | None:
        """The blocks of the state, LOADED where the connector has one; None: it is not there."""
        if key not in self._kept:
            return None
        parts = self._parts(key)
        blocks = [LOADED if (block := self._pool.find(part)) is None else block for part in parts]
        missing = [part for part, block in zip(parts, blocks, strict=True) if block == LOADED]
        if missing and (self._connector is None or self._connector.match(missing) < len(missing)):
            return None
        return blocks

    def hold(self, key: bytes, blocks: Sequence[int]) -> None:
        """Keep what `find` gave until it is released; what the connector has, until the next step message."""
        kept = self._kept[key]
        kept.num_uses += 1
        kept.is_superseded = False
        self._kept.move_to_end(key)
        self._pool.touch([block for block in blocks if block != LOADED])
        if self._connector is not None and LOADED in blocks:
            self._connector.hold(self._missing(key, blocks))

    def load(self, key: bytes, blocks: Sequence[int]) -> StatePlace:
        """The place of a held state, all of whose blocks are there once the next step message's loads are done."""
        missing = self._missing(key, blocks)
        taken = self._pool.take(len(missing))
        if self._connector is not None and missing:
            self._connector.load(missing, taken)
        coming = iter(taken)
        return StatePlace(self._kept[key].slot, [next(coming) if block == LOADED else block for block in blocks])

    def read(self, key: bytes, place: StatePlace) -> None:
        """A step message was written that reads a held place, which is released."""
        if key in self._kept:
            self._pool.register(b"", place.blocks, self._parts(key))
        self._pool.free(place.blocks)

    def release(self, blocks: Iterable[int], after_step: int | None = None) -> None:
        """Blocks that `hold` or `load` held are read by nobody, or by steps up to this one."""
        self._pool.free([block for block in blocks if block != LOADED], after_step)

    def _missing(self, key: bytes, blocks: Sequence[int]) -> list[bytes]:
        return [part for part, block in zip(self._parts(key), blocks, strict=True) if block == LOADED]

    def _parts(self, key: bytes) -> list[bytes]:
        """Returns what the blocks of a state are found by."""
        return [key + number.to_bytes(2, "little") for number in range(self.num_blocks)]

    # ---- kept

    def take(self, num_spared: int) -> StatePlace | None:
        """Memory for one more copy, that of others if need be; None where less than `num_spared` blocks would be left
        to requests."""
        if self._pool.num_free < self.num_blocks + num_spared:
            return None
        if self._free is None:
            slot = NO_SLOT
        else:
            if not self._free and self._kept:
                self._forget(next(iter(self._kept)))
            if not self._free:
                return None
            slot = self._free.pop()
        return StatePlace(slot, self._pool.take(self.num_blocks))

    def keep(self, key: bytes, place: StatePlace, is_shared: bool) -> None:
        """The copy in `place` is complete, and found from now on."""
        found = self.find(key)
        if found is not None and LOADED not in found:
            self.give_back(place)
            return
        if key in self._kept:  # in part, or elsewhere
            self._forget(key)
        self._pool.register(b"", place.blocks, self._parts(key))
        self._pool.free(place.blocks)
        self._kept[key] = _Kept(place.slot, is_shared)
        self._events.announce(key)

    def give_back(self, place: StatePlace, after_step: int | None = None) -> None:
        """Memory that nothing was kept in, though a step may still write it."""
        if self._free is not None:
            self._free.append(place.slot)
        self._pool.free(place.blocks, after_step)

    def supersede(self, key: bytes) -> None:
        """The conversation has left a deeper state: this one is the next to go, unless others have come back to it."""
        kept = self._kept.get(key)
        if kept is None or kept.is_shared or kept.num_uses > 1:
            return
        kept.is_superseded = True
        self._kept.move_to_end(key, last=False)
        self._evict_first(key)

    def drop(self, key: bytes) -> bool:
        """An answer has left a deeper state: nobody else comes back to this one, and no tier is to take it in. False,
        with nothing changed, where somebody did."""
        kept = self._kept.get(key)
        blocks = [block for part in self._parts(key) if (block := self._pool.find(part)) is not None]
        if kept is None or kept.num_uses or any(map(self._pool.is_held, blocks)):
            return False
        self._forget(key)
        self._pool.unregister(blocks)
        return True

    def renew(self, keys: Iterable[bytes], after_step: int | None) -> None:
        """A request ends that left these states or went on from them: they are evicted after its blocks."""
        for key in keys:
            kept = self._kept.get(key)
            if kept is not None and not kept.is_superseded:
                blocks = [block for part in self._parts(key) if (block := self._pool.find(part)) is not None]
                self._pool.touch(blocks)
                self._pool.free(blocks, after_step)

    def settle(self) -> None:
        """Forget states of which something is gone; of those whose block has left the device, the rest follows."""
        doubtful = self._events.doubtful
        if not doubtful:
            return
        for key in [key for key in doubtful if key in self._kept]:
            on_device = self._pool.find(key) is not None
            elsewhere = self._connector is not None and self._connector.match([key]) == 1
            if not (on_device or elsewhere) or self.find(key) is None:
                self._forget(key)
            elif not on_device:
                self._evict_first(key)
        doubtful.clear()

    def forget_all(self) -> None:
        """No state is found any more."""
        for key in list(self._kept):
            self._forget(key)
        self._events.doubtful.clear()

    def _forget(self, key: bytes) -> None:
        kept = self._kept.pop(key)
        if self._free is not None:
            self._free.append(kept.slot)
        self._evict_first(key)
        self._events.withdraw([key])

    def _evict_first(self, key: bytes) -> None:
        found = [self._pool.find(part) for part in self._parts(key)]
        self._pool.evict_first(block for block in found if block is not None)
