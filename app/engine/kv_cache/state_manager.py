"""The KV-cache manager of a model whose layers keep states: a prefix is found where its blocks and a state are there.

A running request's state lies at its row and is overwritten by each step; to be found, a copy of it is kept in a slot
of a pool of its own, under the hash of the block that it stands behind (I5). Copies are taken where a step ends at a
block's border: at the last full block of a prompt, where a prompt leaves what is cached of another one's (a likely
fork: Pan et al., "Marconi", 2024), every INTERVAL tokens, and every ROLLING tokens of an answer, of which the latest
stays. The copy itself is made by the workers before the next step of the request, in the order of the step messages:
so whoever reads a slot in a later message finds what was written into it (I2).

Slots that can be found are evicted least recently used first, apart from blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.prefix_hit import NO_HIT, PrefixHit
from app.records.request_state import Request
from app.records.step import StateCopies

INTERVAL = 4096  # tokens of a long prompt between two copies
ROLLING = 128  # tokens of an answer


@dataclass(slots=True)
class _Copies:
    """A running request's."""

    borders: list[int]  # tokens behind which its prompt shall leave a state, ascending
    source: int | None = None  # the slot that it goes on from, until a step message says so
    # Slots that its state goes to with the next step message, and those that it went to, not yet findable.
    leaving: dict[int, int] = field(default_factory=dict)  # tokens -> slot
    left: dict[int, int] = field(default_factory=dict)
    rolling: bytes | None = None  # the latest copy within its answer


class StateManager(KVCacheManager):
    """See the head of this file."""

    def __init__(self, num_blocks: int, block_size: int, num_kept: int, **options: Any) -> None:
        """`num_kept`: slots for copies; `options` as of the base class, without a connector."""
        super().__init__(num_blocks, block_size, **options)
        self._free = list(range(num_kept - 1, -1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._running: dict[Request, _Copies] = {}
        self._leaves: dict[bytes, Request] = {}  # the block behind which a running request's prompt will leave a state
        self._due: dict[Request, None] = {}  # who has something for the next step message

    @property
    def num_states(self) -> int:
        """Copies that can be found."""
        return len(self._kept)

    # ---- admission

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix behind which a state is kept."""
        hit = super().find_prefix(request)
        length = self._longest(request, hit.num_blocks)
        return PrefixHit(hit.table[:length], hit.held[:length], length) if length else NO_HIT

    def num_known_tokens(self, request: Request) -> int:
        """See KVCacheManager: roughly."""
        known = super().num_known_tokens(request) // self.block_size
        return self._longest(request, known) * self.block_size

    def num_coming(self, request: Request, num_found: int) -> int:
        """Blocks that another request is computing just now, up to the last behind which it will leave a state."""
        if request.skips_cache_read:
            return 0
        hashes = request.block_hashes
        for count in range((request.num_tokens - 1) // self.block_size, num_found, -1):
            maker = self._leaves.get(hashes[count - 1])
            if maker is not None and not maker.paused:
                return count - num_found
        return 0

    def _longest(self, request: Request, num_blocks: int) -> int:
        hashes = request.block_hashes
        return next((n for n in range(num_blocks, 0, -1) if hashes[n - 1] in self._kept), 0)

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int) -> bool:
        """See KVCacheManager; the state behind the hit comes with the next step message."""
        cached = 0 if request.skips_cache_read else super().find_prefix(request).num_blocks
        if not super().admit(request, hit, num_tokens):
            return False
        copies = self._running[request] = _Copies(self._borders(request, hit.num_blocks, cached))
        if hit.num_blocks:
            key = request.block_hashes[hit.num_blocks - 1]
            self._kept.move_to_end(key)
            copies.source = self._kept[key]
            self._due[request] = None
        for border in copies.borders:
            self._leaves.setdefault(request.block_hashes[border // self.block_size - 1], request)
        return True

    def _borders(self, request: Request, num_found: int, num_cached: int) -> list[int]:
        if not self.enable_prefix_caching:
            return []
        size, found = self.block_size, num_found * self.block_size
        last = (request.num_tokens - 2) // size * size  # two tokens are left, so that they are no decode
        self._hash_up_to(request, last // size)  # one that was preempted knows more tokens than it has hashed
        wanted = {last, num_cached * size, *range(INTERVAL, last, INTERVAL)}
        known = request.block_hashes
        return sorted(border for border in wanted if border > found and known[border // size - 1] not in self._kept)

    # ---- steps

    def cut(self, request: Request, begin: int, end: int) -> int:
        """See KVCacheManager: a chunk ends at the next border."""
        copies = self._running.get(request)
        borders = () if copies is None else copies.borders
        return next((border for border in borders if begin < border < end), end)

    def chunk_begins(self, request: Request, position: int) -> None:
        """A step will compute tokens behind `position`, where a state may be wanted."""
        copies = self._running.get(request)
        if copies is not None and position in copies.borders:
            self._leave(request, copies, position)

    def grow_each(self, requests: list[Request]) -> list[list[int]]:
        """See KVCacheManager; each request decodes at a block's border."""
        if self.enable_prefix_caching:
            for request in requests:
                position = len(request.block_ids) * self.block_size
                if position % ROLLING == 0 and request in self._running:
                    self._leave(request, self._running[request], position)
        return super().grow_each(requests)

    def _leave(self, request: Request, copies: _Copies, position: int) -> None:
        if position in copies.leaving or position in copies.left:
            return
        if not self._free and self._kept:
            self._free.append(self._kept.popitem(last=False)[1])
        if self._free:
            copies.leaving[position] = self._free.pop()
            self._due[request] = None

    def take_state_copies(self) -> StateCopies | None:
        """See KVCacheManager."""
        loads: list[tuple[int, int]] = []
        stores: list[tuple[int, int]] = []
        for request in self._due:
            copies = self._running[request]
            if copies.source is not None:
                loads.append((copies.source, request.row))
                copies.source = None
            if copies.leaving:
                stores += ((request.row, slot) for slot in copies.leaving.values())
                copies.left |= copies.leaving
                copies.leaving = {}
        self._due.clear()
        return StateCopies(loads, stores) if loads or stores else None

    # ---- steps return

    def next_publish(self, request: Request) -> int:
        """See KVCacheManager; at once where a copy waits to be found."""
        copies = self._running.get(request)
        if copies is not None and (copies.left or copies.leaving or self._is_at_border(request, copies)):
            return request.num_published_blocks * self.block_size + 1
        return super().next_publish(request)

    def _is_at_border(self, request: Request, copies: _Copies) -> bool:
        return request.num_published_blocks * self.block_size in copies.borders

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """See KVCacheManager; copies that were made behind known tokens can be found from now on."""
        super().publish(request, num_computed_tokens)
        self._register(request, num_computed_tokens)

    def _register(self, request: Request, num_tokens: int) -> None:
        copies = self._running.get(request)
        if copies is None:
            return
        for position in [position for position in copies.left if position <= num_tokens]:
            slot = copies.left.pop(position)
            self._hash_up_to(request, position // self.block_size)
            key = request.block_hashes[position // self.block_size - 1]
            if key in self._kept:
                self._free.append(slot)
            else:
                self._kept[key] = slot
            if position in copies.borders:
                copies.borders.remove(position)
                self._leaves_no_more(request, position)
            elif position % INTERVAL:
                self._roll(copies, key)

    def _leaves_no_more(self, request: Request, border: int) -> None:
        key = request.block_hashes[border // self.block_size - 1]
        if self._leaves.get(key) is request:
            del self._leaves[key]

    def _roll(self, copies: _Copies, key: bytes) -> None:
        """The latest copy within an answer takes the place of the one before it."""
        if copies.rolling is not None and (slot := self._kept.pop(copies.rolling, None)) is not None:
            self._free.append(slot)
        copies.rolling = key

    def free(self, request: Request, after_step: int | None) -> None:
        """See KVCacheManager; copies that no step message has named are none."""
        copies = self._running.get(request)
        if copies is not None:
            self._register(request, request.num_tokens)
            for border in copies.borders:
                self._leaves_no_more(request, border)
            del self._running[request]
            self._due.pop(request, None)
            self._free += [*copies.leaving.values(), *copies.left.values()]
        super().free(request, after_step)

    def forget(self) -> None:
        """See KVCacheManager; states are forgotten, too."""
        super().forget()
        self._free += self._kept.values()
        self._kept.clear()
