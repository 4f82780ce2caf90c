"""One modelled engine replica: continuous batching, chunked prefill, and the engine's own BlockPool and KVEventLog.

Steps that only decode are taken in one leap to the first end of a request; an arrival cuts the leap at the end of the
step it falls into. What is left out: preemption (a request is admitted once there are blocks for its whole answer).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from app.engine.kv_cache.block_pool import BlockPool
from app.records.kv_events import KVEventLog
from app.records.load_report import LoadReport
from app.records.stats import EWMA_WEIGHT, TYPICAL_OUTPUT_TOKENS, EngineStats, StepCosts
from loadtest.simulation.sim_adapters import SimAdapters
from loadtest.simulation.speeds import Speeds
from loadtest.simulation.traffic import BLOCK_SIZE, SimRequest

MAX_NUM_SEQS = 128
MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(slots=True)
class Job:
    """A request on a replica. `num_known` tokens are given: the prompt, and what it had generated elsewhere."""

    request: SimRequest
    num_known: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0  # blocks
    first_step: int = 0  # number of the step that brought its first token here

    @property
    def num_new(self) -> int:
        """Tokens that it generates here, at most."""
        return self.request.whole.num_tokens - self.num_known


@dataclass(slots=True)
class Finished:
    """What a step brought."""

    first_tokens: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class SimReplica:
    """Driven by the fleet: `submit`, then `begin` -> when the step ends -> `end`, until `begin` answers None."""

    def __init__(self, name: str, incarnation: str, num_blocks: int, speeds: Speeds, adapter_places: int = 0) -> None:
        self.name = name
        self.incarnation = incarnation
        self.num_blocks = num_blocks
        self.events = KVEventLog(name, incarnation)
        self.busy_s = 0.0
        self.num_computed_tokens = 0
        self.num_requests = 0  # that were submitted
        self.waiting: deque[Job] = deque()
        self.adapters = SimAdapters(adapter_places)
        self._pool = BlockPool(num_blocks, self.events)
        self._speeds = speeds
        self._prefilling: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []  # a heap by the number of the last step
        self._order = itertools.count()
        self._coming: dict[bytes, Job] = {}
        self._context = 0  # tokens of the decoding requests
        self._step = 0  # steps done
        self._chunks: list[tuple[Job, int]] = []
        self._began_s = 0.0
        self._step_s = 0.0
        self._leap = 0  # steps in flight
        self._waits = False  # for an adapter, and computes nothing
        self._costs = StepCosts()
        self._mean_output = TYPICAL_OUTPUT_TOKENS

    @property
    def is_stepping(self) -> bool:
        """Whether a step is in flight."""
        return self._leap > 0

    def jobs(self) -> list[Job]:
        """All requests that it has."""
        return [*self.waiting, *self._prefilling, *(job for _, _, job in self._decoding)]

    def submit(self, request: SimRequest, num_generated: int) -> None:
        """Take a request; `num_generated` tokens of its answer are known."""
        self.num_requests += 1
        self.waiting.append(Job(request, request.prompt.num_tokens + num_generated))

    # ---- steps

    def begin(self, now: float) -> float | None:
        """Start the next step, or a leap of steps; when it ends. None when there is nothing to do."""
        self.adapters.advance(now)
        self._admit()
        decodes = len(self._decoding)
        budget = MAX_NUM_BATCHED_TOKENS - decodes
        self._chunks, prefill_s = [], 0.0
        for job in self._prefilling:
            if budget <= 0:
                break
            count = min(budget, job.num_known - job.num_computed)
            budget -= count
            self._chunks.append((job, count))
            prefill_s += self._speeds.prefill_s(count, job.num_computed)
        if not self._chunks and not decodes:
            return self._begin_to_wait(now)
        self._leap = 1 if self._chunks else self._decoding[0][0] - self._step
        context = self._context + decodes * (self._leap - 1) / 2
        self._began_s, self._step_s = now, self._speeds.step_s(prefill_s, decodes, context)
        self._step_s += self.adapters.take_load_s()
        return now + self._leap * self._step_s

    def _begin_to_wait(self, now: float) -> float | None:
        """Nothing can be computed until an adapter has been read; None: nothing is read either."""
        left_s = self.adapters.left_s if self.waiting else None
        if left_s is None:
            return None
        self._leap, self._began_s, self._waits = 1, now, True
        return now + left_s

    def cut(self, now: float) -> float | None:
        """A request came: let a leap end with the step that runs now. When, or None if nothing changes."""
        if self._waits:
            return now
        if self._leap <= 1:
            return None
        leap = min(self._leap, math.floor((now - self._began_s) / self._step_s) + 1)
        if leap == self._leap:
            return None
        self._leap = leap
        return self._began_s + leap * self._step_s

    def end(self) -> Finished:
        """The step or the leap is over, or the wait for an adapter."""
        steps, self._leap = self._leap, 0
        if self._waits:
            self._waits = False
            return Finished()
        self.busy_s += steps * self._step_s
        self._step += steps
        decodes = len(self._decoding)
        self._context += steps * decodes
        num_prefill = sum(count for _, count in self._chunks)
        self.num_computed_tokens += steps * decodes + num_prefill
        self._costs.observe(num_prefill, decodes, self._step_s)
        found = Finished()
        while self._decoding and self._decoding[0][0] <= self._step:
            job = heapq.heappop(self._decoding)[2]
            self._context -= job.request.whole.num_tokens
            self._finish(job, found)
        for job, count in self._chunks:
            self._prefilled(job, count, found)
        return found

    def _prefilled(self, job: Job, count: int, found: Finished) -> None:
        job.num_computed += count
        self._publish(job, job.num_computed)
        if job.num_computed < job.num_known:
            return
        self._prefilling.remove(job)
        job.first_step = self._step
        found.first_tokens.append(job)
        if job.num_new <= 1:
            self._finish(job, found)
        else:
            self._context += job.num_known + 1
            heapq.heappush(self._decoding, (self._step + job.num_new - 1, next(self._order), job))

    def _finish(self, job: Job, found: Finished) -> None:
        self._publish(job, job.request.whole.num_tokens - 1)  # the last token is never fed back
        self._pool.free(job.blocks)
        self.adapters.leave(job.request.adapter)
        self._mean_output += EWMA_WEIGHT * (job.request.num_output_tokens - self._mean_output)
        found.ended.append(job)

    def _publish(self, job: Job, num_computed: int) -> None:
        done, full = job.num_published, num_computed // BLOCK_SIZE
        if full <= done:
            return
        hashes = list(job.request.whole.hashes[done:full])
        for block_hash in hashes:
            if self._coming.get(block_hash) is job:
                del self._coming[block_hash]
        self._pool.register(job.request.whole.hashes[done - 1] if done else b"", job.blocks[done:full], hashes)
        job.num_published = full

    # ---- admission

    def _admit(self) -> None:
        budget = MAX_NUM_BATCHED_TOKENS - len(self._decoding)
        budget -= sum(job.num_known - job.num_computed for job in self._prefilling)
        passed: list[Job] = []
        while self.waiting and budget > 0 and len(self._prefilling) + len(self._decoding) < MAX_NUM_SEQS:
            job = self.waiting.popleft()
            if not self.adapters.has_room(job.request.adapter):
                passed.append(job)
                continue
            prefix = self._find(job)
            hashes = job.request.whole.hashes
            most = (job.num_known - 1) // BLOCK_SIZE
            if len(prefix) < most and hashes[len(prefix)] in self._coming:
                passed.append(job)  # another request computes what it needs
                continue
            needed = -(-job.request.whole.num_tokens // BLOCK_SIZE) - len(prefix)
            if needed > self._pool.num_free - sum(not self._pool.is_held(block) for block in prefix):
                self.waiting.appendleft(job)
                break
            self.adapters.enter(job.request.adapter)
            self._pool.touch(prefix)
            job.blocks = prefix + self._pool.take(needed)
            job.num_published = len(prefix)
            job.num_computed = job.request.num_cached_tokens = len(prefix) * BLOCK_SIZE
            for block_hash in hashes[len(prefix) : most]:
                self._coming.setdefault(block_hash, job)
            self._prefilling.append(job)
            budget -= job.num_known - job.num_computed
        self.waiting.extendleft(reversed(passed))

    def _find(self, job: Job) -> list[int]:
        blocks = []
        for block_hash in job.request.whole.hashes[: (job.num_known - 1) // BLOCK_SIZE]:
            block = self._pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _num_known_tokens(self, job: Job) -> int:
        """The same as KVCacheManager.num_known_tokens."""
        hashes = job.request.whole.hashes
        low, high = 0, (job.num_known - 1) // BLOCK_SIZE
        while low < high:
            middle = (low + high + 1) // 2
            block_hash = hashes[middle - 1]
            if self._pool.find(block_hash) is not None or block_hash in self._coming:
                low = middle
            else:
                high = middle - 1
        return low * BLOCK_SIZE

    # ---- what it tells

    def stats(self, now: float) -> EngineStats:
        """What its engine would say of itself; what is no concern of the simulation is 0."""
        load = self.report(now)
        return EngineStats(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_paused=0,
            num_deferred=0,
            num_blocks=self.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
            outstanding_prefill_tokens=load.queued_prefill_tokens,
            outstanding_decode_tokens=load.outstanding_tokens - load.queued_prefill_tokens,
            steps_total=self._step,
            prefill_token_s=load.prefill_token_s,
            decode_step_s=load.decode_step_s,
            prefill_s_total=self._costs.prefill_s_total,
        )

    def num_generated(self, job: Job, now: float) -> int:
        """Tokens of the answer that are known at `now`, here or from before."""
        before = job.num_known - job.request.prompt.num_tokens
        if job.first_step == 0:
            return before
        steps = self._step + (math.floor((now - self._began_s) / self._step_s) if self._leap > 1 else 0)
        return min(before + steps - job.first_step + 1, job.request.num_output_tokens)

    def report(self, now: float) -> LoadReport:
        """Its heartbeat, with the numbers that EngineReplica would send."""
        left = sum(job.num_known - job.num_computed for job in self._prefilling)
        queued = left + sum(job.num_known - self._num_known_tokens(job) for job in self.waiting)
        rest = sum(max(1, round(self._mean_output) - self.num_generated(job, now)) for job in self.jobs())
        held = self.num_blocks - self._pool.num_free
        return LoadReport(
            model="simulated",
            replica_id=self.name,
            incarnation=self.incarnation,
            accepting=True,
            num_running=len(self._prefilling) + len(self._decoding),
            num_waiting=len(self.waiting),
            outstanding_tokens=queued + rest,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            index=0,
            queued_prefill_tokens=queued,
            resident_tokens=held * BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            prefill_token_s=self._costs.prefill_token_s,
            decode_step_s=self._costs.decode_step_s,
            model_revision="simulated",
            adapters=self.adapters.state,
        )
