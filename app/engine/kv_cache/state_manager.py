"""The KV-cache manager of a model whose layers keep states: a prefix is found where its blocks and a state are there.

A running request's state lies at its row and is overwritten by each step; to be found, a copy of it is kept
(kept_states.py). Copies are taken where a step ends at a block's border: at the last full block of a prompt, where its
messages end, where it leaves what is cached of another one's (a likely fork: Pan et al., "Marconi", 2024), every
INTERVAL tokens, and at borders of an answer's blocks, at each where few requests run, unless drafts are verified: then
the host hears too late where an answer's state stands. The copy itself is made by the workers before the next step of
the request, in the order of the step messages: so whoever reads it in a later message finds what was written (I2).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from app.engine.kv_cache.kept_states import KeptStates, StatePlace
from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.prefix_hit import NO_HIT, PrefixHit
from app.engine.kv_cache.running_rows import RunningRows
from app.engine.kv_cache.state_events import StateEvents
from app.records.kv_events import KVEventSink
from app.records.message_borders import MessageBorders
from app.records.request_state import Request
from app.records.state_pool import StatePool
from app.records.step import StateCopies, StateCopy

INTERVAL = 4096  # tokens of a long prompt between two copies
# Nobody knows in advance where an answer ends. A copy costs the device what some tokens of a prompt do: so many
# running requests leave one at each block, twice as many at each second one, and none more rarely than every ROLLING
# tokens. Then a step of up to 64 requests makes half a copy on average.
FEW, ROLLING = 8, 128


@dataclass(slots=True)
class _Copies:
    """A running request's."""

    borders: list[int]  # tokens behind which its prompt shall leave a state, ascending
    shared: int = -1  # the one of them up to which conversations are likely to be alike
    source: tuple[bytes, StatePlace] | None = None  # what it goes on from, until a step message says so
    # Where its state is copied with the next step message, and where it was, not yet findable.
    leaving: list[int] = field(default_factory=list)  # tokens
    left: dict[int, StatePlace] = field(default_factory=dict)
    path: list[bytes] = field(default_factory=list)  # states that it went on from or left, the deepest last
    of_answer: bytes | None = None  # the last of them, where its answer left it


class StateManager(KVCacheManager):
    """See the head of this file."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        states: StatePool,
        *,
        keeps_answers: bool = True,
        sink: KVEventSink | None = None,
        **options: Any,
    ) -> None:
        """`options` as of the base class; `sink` may be a StateEvents already, which the connector reports to.
        `keeps_answers`: False where rows have drafts, so that an answer's block may not end where a step does."""
        events = sink if isinstance(sink, StateEvents) else StateEvents(sink)
        super().__init__(num_blocks, block_size, sink=events, **options)
        self._kept = KeptStates(states, self.pool, self.connector, events)
        self._keeps_answers = keeps_answers and self.enable_prefix_caching
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
        hit, hashes = super().find_prefix(request), request.block_hashes
        # Beside the state's blocks one more must have room, so that the request can go on.
        most = min(hit.num_blocks, self.pool.num_blocks - self._kept.num_blocks - 1)
        if hit.num_loads:  # two tokens are left: one that waits for loads is not to come back as a decode
            most = min(most, (request.num_tokens - 2) // self.block_size)
        for length in range(most, 0, -1):
            state = self._kept.find(hashes[length - 1])
            if state is not None:
                return PrefixHit.of(hit.table[:length], state)
        return NO_HIT

    def num_known_tokens(self, request: Request) -> int:
        """See KVCacheManager: roughly."""
        known, hashes = super().num_known_tokens(request) // self.block_size, request.block_hashes
        return next((n for n in range(known, 0, -1) if hashes[n - 1] in self._kept), 0) * self.block_size

    def num_coming(self, request: Request, num_found: int) -> int:
        """Blocks that another request is computing just now, up to the last behind which it will leave a state."""
        if request.skips_cache_read:
            return 0
        hashes = request.block_hashes  # one that was preempted knows more tokens than it has hashed
        for count in range(min(len(hashes), (request.num_tokens - 1) // self.block_size), num_found, -1):
            maker = self._leaves.get(hashes[count - 1])
            if maker is not None and not maker.paused:
                return count - num_found
        return 0

    def fits(self, num_tokens: int, hit: PrefixHit, running: RunningRows) -> bool:
        """See KVCacheManager; the blocks of the state are held for a moment only."""
        return super().fits(num_tokens, replace(hit, state=()), running) and self.num_slots_after_hit(hit) > 0

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int) -> bool:
        """See KVCacheManager; the state behind the hit comes with the next step message."""
        cached = 0 if request.skips_cache_read else super().find_prefix(request).num_blocks
        key = request.block_hashes[hit.num_blocks - 1] if hit.num_blocks else None
        if key is not None:
            self._kept.hold(key, hit.state)  # before anything is taken, which may evict what nobody holds
        if not super().admit(request, hit, num_tokens):
            self._kept.release(hit.state)
            return False
        copies = self._running[request] = _Copies(self._borders(request, hit.num_blocks, cached))
        if key is not None:
            copies.source = key, self._kept.load(key, hit.state)
            copies.path.append(key)
            self._due[request] = None
        asked = request.spec.asked(MessageBorders)
        if asked is not None and asked.tokens:
            copies.shared = self._floor(asked.tokens[0])
        for border in copies.borders:
            self._leaves.setdefault(request.block_hashes[border // self.block_size - 1], request)
        return True

    def _borders(self, request: Request, num_found: int, num_cached: int) -> list[int]:
        if not self.enable_prefix_caching:
            return []
        size, found = self.block_size, num_found * self.block_size
        last = self._floor(request.num_tokens - 2)  # two tokens are left, so that they are no decode
        self._hash_up_to(request, last // size)  # one that was preempted knows more tokens than it has hashed
        asked = request.spec.asked(MessageBorders)
        messages = () if asked is None else map(self._floor, asked.tokens)
        wanted = {last, num_cached * size, *range(INTERVAL, last, INTERVAL), *messages}
        known = request.block_hashes
        return sorted(
            border for border in wanted if found < border <= last and self._kept.find(known[border // size - 1]) is None
        )

    def _floor(self, num_tokens: int) -> int:
        """The last border of blocks within so many tokens."""
        return num_tokens // self.block_size * self.block_size

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
        if self._keeps_answers:
            grain = self._answers_grain()
            for request in requests:
                position = len(request.block_ids) * self.block_size
                if position % grain == 0 and request in self._running:
                    self._leave(request, self._running[request], position)
        return super().grow_each(requests)

    def _answers_grain(self) -> int:
        """Tokens of an answer between two copies: a power of two of blocks."""
        blocks = 1 << ((len(self._running) - 1) // FEW).bit_length()
        return min(self.block_size * blocks, max(ROLLING, self.block_size))

    def _leave(self, request: Request, copies: _Copies, position: int) -> None:
        if position not in copies.leaving and position not in copies.left:
            copies.leaving.append(position)
            self._due[request] = None

    def take_state_copies(self) -> StateCopies | None:
        """See KVCacheManager. Nothing more is taken for the message: what is free now may hold copies."""
        loads: list[StateCopy] = []
        stores: list[StateCopy] = []
        for request in list(self._due):
            if request.is_loading:  # other blocks of its prefix are on their way, or these
                continue
            del self._due[request]
            copies = self._running[request]
            if copies.source is not None:
                key, place = copies.source
                loads.append(StateCopy(request.row, *place))
                self._kept.read(key, place)
                copies.source = None
            for position in copies.leaving:
                place_left = self._kept.take(len(self._running))
                if place_left is not None:
                    stores.append(StateCopy(request.row, *place_left))
                    copies.left[position] = place_left
                elif position in copies.borders:  # nobody is to wait for it
                    self._passed(request, copies, position)
            copies.leaving = []
        self._kept.settle()
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
            self._hash_up_to(request, position // self.block_size)
            key = request.block_hashes[position // self.block_size - 1]
            self._kept.keep(key, copies.left.pop(position), position == copies.shared)
            if copies.of_answer is not None and self._kept.drop(copies.of_answer):
                copies.path.pop()
            elif copies.path:
                self._kept.supersede(copies.path[-1])
            copies.path.append(key)
            copies.of_answer = None if position in copies.borders else key
            if position in copies.borders:
                self._passed(request, copies, position)

    def _passed(self, request: Request, copies: _Copies, border: int) -> None:
        copies.borders.remove(border)
        self._leaves_no_more(request, border)

    def _leaves_no_more(self, request: Request, border: int) -> None:
        key = request.block_hashes[border // self.block_size - 1]
        if self._leaves.get(key) is request:
            del self._leaves[key]

    def free(self, request: Request, after_step: int | None) -> None:
        """See KVCacheManager; copies that no step message has named are none."""
        if request not in self._running:
            super().free(request, after_step)
            return
        self._register(request, request.num_tokens)
        copies = self._running.pop(request)
        self._due.pop(request, None)
        for border in copies.borders:
            self._leaves_no_more(request, border)
        for place in copies.left.values():
            self._kept.give_back(place, after_step)
        if copies.source is not None:
            self._kept.release(copies.source[1].blocks, after_step)
        # Blocks that become free later do so in the opposite order.
        if after_step is not None:
            self._kept.renew(copies.path, after_step)
        super().free(request, after_step)
        if after_step is None:
            self._kept.renew(copies.path, None)

    def forget(self) -> None:
        """See KVCacheManager; states are forgotten, too."""
        self._kept.forget_all()
        super().forget()
