"""Tracks which blocks each request holds: prefix lookup, growth, publication of full blocks, release.

The cache is paged (Kwon et al., "PagedAttention", SOSP 2023), and a full block is found by the hash of all before it.

A block becomes findable only when the step message that computed its last token has returned, so its content is
computed and its token ids are known (I2). A prefix hit never covers a whole request: at least one token is left to
compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from app.engine.kv_cache.block_pool import BlockPool
from app.engine.kv_cache.prefix_hit import LOADED, NO_HIT, PrefixHit
from app.engine.kv_cache.running_rows import RunningRows
from app.engine.kv_connector.base import KVConnector
from app.records.block_hash import hash_blocks
from app.records.kv_events import KVEventSink
from app.records.media import block_extras
from app.records.request_state import Request
from app.records.step import StateCopies

NEVER = np.iinfo(np.int32).max


class KVCacheManager:
    """Keeps `block_ids`, `block_hashes` and `num_published_blocks` of each request in step with the pool.

    A request's table has an entry for each block of its tokens; of a model whose layers form several groups
    (window_manager.py), one for each group, `num_groups` side by side.
    """

    num_groups = 1

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        hash_key: bytes,
        enable_prefix_caching: bool = True,
        sink: KVEventSink | None = None,
        connector: KVConnector | None = None,
    ) -> None:
        """`connector` is a further tier, which takes in what the device evicts."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.connector = connector
        self.pool = BlockPool(num_blocks, sink, *(connector.hooks if connector is not None else ()))
        self._hash_key = hash_key
        self._coming: dict[bytes, Request] = {}  # prompt blocks being computed -> who computes them

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def hash_known(self, request: Request) -> None:
        """Fill `block_hashes` with the full blocks of what a new request brings; callable from any thread."""
        if self.enable_prefix_caching:
            request.block_hashes = []
            self._hash_up_to(request, request.num_tokens // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can have."""
        return self.pool.num_blocks

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request that has all blocks to itself."""
        return self.num_blocks * self.block_size

    @property
    def num_free_slots(self) -> int:
        """Tokens that one request could get slots for now."""
        return self.pool.num_free // self.num_groups * self.block_size

    def num_slots(self, request: Request) -> int:
        """Tokens that the request has slots for."""
        return len(request.block_ids) // self.num_groups * self.block_size

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks to allocate until the request has slots for `num_tokens` tokens; not positive: none."""
        return self.num_blocks_for(num_tokens) * self.num_groups - len(request.block_ids)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest known prefix of the request that is cached, each block on the device or in the connector."""
        if not self.enable_prefix_caching or request.skips_cache_read:
            return NO_HIT
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        return PrefixHit.of(self._found(hashes)) if hashes else NO_HIT

    def _found(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest prefix that is there, LOADED where the device lacks one."""
        blocks: list[int] = []
        loadable = 0  # the connector has all up to here
        for place, block_hash in enumerate(hashes):
            block = self.pool.find(block_hash)
            if block is None:
                if place >= loadable and self.connector is not None:
                    loadable = place + self.connector.match(hashes[place:])
                if place >= loadable:
                    break
                block = LOADED
            blocks.append(block)
        return blocks

    def num_coming(self, request: Request, num_found: int) -> int:
        """Blocks after the first `num_found` that another request is computing for its own prompt just now."""
        if request.skips_cache_read:
            return 0
        most = (request.num_tokens - 1) // self.block_size
        coming = 0
        for block_hash in request.block_hashes[num_found:most]:
            maker = self._coming.get(block_hash)
            if maker is None or maker.paused:
                break
            coming += 1
        return coming

    def num_known_tokens(self, request: Request) -> int:
        """Roughly how many tokens of a waiting request need no computing: cached, or being computed for another one.

        Any thread may ask, for the load report: a bisection, which takes the known blocks for a prefix.
        """
        if not self.enable_prefix_caching or request.skips_cache_read:
            return 0
        hashes = request.block_hashes
        low, high = 0, min((request.num_tokens - 1) // self.block_size, len(hashes))
        while low < high:
            middle = (low + high + 1) // 2
            block_hash = hashes[middle - 1]
            if self.pool.find(block_hash) is not None or block_hash in self._coming:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def fits(self, num_tokens: int, hit: PrefixHit, running: RunningRows) -> bool:
        """True if there are blocks for all `num_tokens` tokens of a request that has found `hit`, beside what running
        ones still need for theirs and a small reserve. Beside nobody, whatever fits the pool does.
        """
        needed = self.num_blocks_for(num_tokens) - len(hit.held)
        free = self.num_free_after_hit(hit)
        if not len(running.num_tokens):
            return needed <= free
        short = (running.num_tokens - running.num_slots + self.block_size - 1) // self.block_size
        return needed + int(np.maximum(short, 0).sum()) + self.pool.num_blocks // 100 <= free

    def num_slots_after_hit(self, hit: PrefixHit) -> int:
        """Tokens behind `hit` that a request could get slots for now."""
        return (self.num_free_after_hit(hit) - hit.table.count(LOADED)) // self.num_groups * self.block_size

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int) -> bool:
        """Hold the blocks of `hit` and allocate slots up to `num_tokens`; False, with nothing changed, when blocks are
        short.

        What the connector has comes with the next step message. Like computed blocks it is published once a step
        message that reads it has returned.
        """
        assert not request.block_ids
        loads = [place for place, block in enumerate(hit.table) if block == LOADED] if hit.num_loads else []
        needed = (self.num_blocks_for(num_tokens) - hit.num_blocks) * self.num_groups + len(loads)
        if needed > self.num_free_after_hit(hit):
            return False
        self.pool.touch(hit.held)  # before `take`, which may evict what nobody holds
        wanted = [self._key(request, place) for place in loads]
        if wanted and self.connector is not None:
            self.connector.hold(wanted)  # likewise
        taken = self.pool.take(needed)
        if wanted and self.connector is not None:
            self.connector.load(wanted, taken[: len(wanted)])
        if self.connector is not None and not request.skips_cache_read:
            wanted_blocks = (request.num_tokens - 1) // self.block_size - hit.num_blocks + hit.num_loads
            self.connector.count_lookup(wanted_blocks * self.block_size, hit.num_loads * self.block_size)
        request.block_ids = [*hit.table, *taken[len(loads) :]]
        for place, block in zip(loads, taken, strict=False):
            request.block_ids[place] = block
        request.num_published_blocks = loads[0] // self.num_groups if loads else hit.num_blocks
        for block_hash in request.block_hashes[request.num_published_blocks :]:
            self._coming.setdefault(block_hash, request)
        return True

    def _key(self, request: Request, place: int) -> bytes:
        """Returns what the block at a place of the request's table is found by."""
        return request.block_hashes[place]

    def cut(self, request: Request, begin: int, end: int) -> int:
        """Returns the end, `end` or an earlier one, of a prompt's chunk that begins behind `begin` tokens."""
        return end

    def chunk_begins(self, request: Request, position: int) -> None:
        """A step will compute tokens of the request behind the first `position` ones."""

    def take_state_copies(self) -> StateCopies | None:
        """Takes what the step message that is being written tells the workers to copy of states."""
        return None

    def take_transfers(self) -> Any | None:
        """Takes what the connector has for the step message that is being written."""
        return None if self.connector is None else self.connector.take_transfers()

    def num_free_after_hit(self, hit: PrefixHit) -> int:
        """Blocks left to hand out once those of `hit` are held."""
        free = self.pool.num_free
        if not hit.num_blocks:
            return free
        kept = [block for block in hit.state if block != LOADED]
        return free - sum(not self.pool.is_held(block) for block in (*hit.held, *kept)) - len(hit.state) + len(kept)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate slots up to `num_tokens` tokens: the new block ids, or None with nothing changed."""
        needed = self.num_missing(request, num_tokens)
        if needed <= 0:
            return []
        if needed > self.pool.num_free:
            return None
        blocks = self.pool.take(needed)
        request.block_ids += blocks
        return blocks

    def grow_each(self, requests: list[Request]) -> list[list[int]]:
        """Slots for one more block of tokens of each of these requests, of which there must be enough: each one's new
        block ids."""
        width = self.num_groups
        taken = self.pool.take(len(requests) * width)
        blocks = [taken[start : start + width] for start in range(0, len(taken), width)]
        for request, new in zip(requests, blocks, strict=True):
            request.block_ids += new
        return blocks

    def next_publish(self, request: Request) -> int:
        """Computed tokens at which `publish` has something to do."""
        return (request.num_published_blocks + 1) * self.block_size if self.enable_prefix_caching else int(NEVER)

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens findable; those tokens must be known."""
        if not self.enable_prefix_caching:
            return
        done, full = request.num_published_blocks, num_computed_tokens // self.block_size
        if full <= done:
            return
        self._hash_up_to(request, full)
        hashes = request.block_hashes
        parent = hashes[done - 1] if done else request.root_hash
        self._forget_coming(request, hashes[done:full])
        self.pool.register(parent, request.block_ids[done:full], hashes[done:full])
        request.num_published_blocks = full

    def _hash_up_to(self, request: Request, num_blocks: int) -> None:
        """Hash the first blocks of the request, all of whose tokens are known."""
        hashes, size = request.block_hashes, self.block_size
        if num_blocks > len(hashes):
            parent = hashes[-1] if hashes else request.root_hash
            tokens = request.token_ids[len(hashes) * size : num_blocks * size]
            extras = block_extras(request.spec.asks, size, len(hashes))
            hashes += hash_blocks(self._hash_key, parent, tokens, size, extras)

    def forget(self) -> None:
        """Nothing that was computed so far is found again, in no tier. No step is out."""
        self.pool.forget()
        if self.connector is not None:
            self.connector.forget()

    def free(self, request: Request, after_step: int | None) -> None:
        """Give all blocks back; at once, or when step message `after_step`, which may write them, has returned."""
        self._forget_coming(request, request.block_hashes[request.num_published_blocks :])
        self.pool.free(request.block_ids, after_step)
        request.block_ids = []
        request.num_published_blocks = 0

    def _forget_coming(self, request: Request, hashes: list[bytes]) -> None:
        """These blocks are published, or will not come after all."""
        for block_hash in hashes:
            if self._coming.get(block_hash) is request:
                del self._coming[block_hash]
