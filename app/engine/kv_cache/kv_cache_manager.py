"""Which blocks each request holds: prefix lookup, growth, publication of full blocks, release.

The cache is paged (Kwon et al., "PagedAttention", SOSP 2023), and a full block is found by the hash of all before it.

A block becomes findable only when the step message that computed its last token has returned, so its content is
computed and its token ids are known (I2). A prefix hit never covers a whole request: at least one token is left to
compute.
"""

from __future__ import annotations

from app.engine.kv_cache.block_hash import hash_blocks
from app.engine.kv_cache.block_pool import BlockPool
from app.engine.kv_cache.kv_events import KVEventSink
from app.engine.kv_connector.base import KVConnector
from app.engine.scheduler.request import Request
from app.engine.step import KVTransfers


class KVCacheManager:
    """Keeps `block_ids`, `block_hashes` and `num_published_blocks` of each request in step with the pool."""

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
        self.pool = BlockPool(num_blocks, sink, connector.evicted if connector is not None else None)
        self._hash_key = hash_key
        self._coming: dict[bytes, Request] = {}  # prompt blocks being computed -> who computes them

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def hash_known(self, request: Request) -> None:
        """Fill `block_hashes` with the full blocks of what a new request brings; callable from any thread."""
        if self.enable_prefix_caching:
            request.block_hashes = hash_blocks(self._hash_key, request.root_hash, request.token_ids, self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold the longest known prefix of the request; nothing is taken yet."""
        if not self.enable_prefix_caching or request.skips_cache_read:
            return []
        blocks: list[int] = []
        most = (request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[:most]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_loadable(self, request: Request, num_found: int) -> int:
        """Blocks after the first `num_found` that the connector can bring back now."""
        if self.connector is None or request.skips_cache_read:
            return 0
        most = (request.num_tokens - 1) // self.block_size
        return self.connector.match(request.block_hashes[num_found:most])

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

    def admit(self, request: Request, prefix: list[int], num_tokens: int, num_loads: int = 0) -> bool:
        """Hold `prefix` and allocate slots up to `num_tokens`; False, with nothing changed, when blocks are short.

        The `num_loads` blocks after `prefix` come from the connector, with the next step message. Like computed ones
        they are published once a step message that reads them has returned.
        """
        assert not request.block_ids
        needed = self.num_blocks_for(num_tokens) - len(prefix)
        if needed > self.num_free_after_hit(prefix):
            return False
        self.pool.touch(prefix)  # before `take`, which may evict what nobody holds
        wanted = request.block_hashes[len(prefix) : len(prefix) + num_loads]
        if wanted and self.connector is not None:
            self.connector.hold(wanted)  # likewise
        taken = self.pool.take(needed)
        if wanted and self.connector is not None:
            self.connector.load(wanted, taken[: len(wanted)])
        if self.connector is not None and not request.skips_cache_read:
            wanted_blocks = (request.num_tokens - 1) // self.block_size - len(prefix)
            self.connector.looked_up(wanted_blocks * self.block_size, num_loads * self.block_size)
        request.block_ids = prefix + taken
        request.num_published_blocks = len(prefix)
        for block_hash in request.block_hashes[len(prefix) :]:
            self._coming.setdefault(block_hash, request)
        return True

    def take_transfers(self) -> KVTransfers | None:
        """The connector's copies for the step message that is being written."""
        return None if self.connector is None else self.connector.take_transfers()

    def num_free_after_hit(self, prefix: list[int]) -> int:
        """Blocks left to hand out once `prefix` is held."""
        return self.pool.num_free - sum(not self.pool.is_held(block) for block in prefix)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate slots up to `num_tokens` tokens: the new block ids, or None with nothing changed."""
        needed = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if needed <= 0:
            return []
        if needed > self.pool.num_free:
            return None
        blocks = self.pool.take(needed)
        request.block_ids += blocks
        return blocks

    def grow_each(self, requests: list[Request]) -> list[int]:
        """One more block for each of these requests, of which there must be enough: the block ids."""
        blocks = self.pool.take(len(requests))
        for request, block in zip(requests, blocks, strict=True):
            request.block_ids.append(block)
        return blocks

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens findable; those tokens must be known."""
        if not self.enable_prefix_caching:
            return
        done, full = request.num_published_blocks, num_computed_tokens // self.block_size
        if full <= done:
            return
        hashes = request.block_hashes
        if full > len(hashes):
            first = len(hashes)
            parent = hashes[-1] if hashes else request.root_hash
            tokens = request.token_ids[first * self.block_size : full * self.block_size]
            hashes += hash_blocks(self._hash_key, parent, tokens, self.block_size)
        parent = hashes[done - 1] if done else request.root_hash
        self._forget_coming(request, hashes[done:full])
        self.pool.register(parent, request.block_ids[done:full], hashes[done:full])
        request.num_published_blocks = full

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
