"""Decides what each step computes.

Invariant I1, one counter: there is no prefill mode and no decode mode. Each request has `num_tokens` (known, or on
their way back) and `num_computed_tokens`; a step brings the second towards the first, and a request that gets there
samples one more token. Prefill, chunked prefill, decode, prefix hits and resumed requests are all this rule. Requests
enter and leave between steps (continuous batching: Orca, Yu et al., 2022), and prompts are cut into chunks that decodes
share a step with (Sarathi-Serve: Agrawal et al., 2024).

Order within a step: requests one token short (decodes), then running requests that are further behind, then waiting
ones, under `max_num_batched_tokens`, `max_step_s` (`prompt_time`) and the number of rows. Blocks are taken from
requests of lower rank when they run out (preemption by recomputation), so the request of the highest rank always makes
progress. Counters run ahead of the tokens (I2): a step is scheduled before the previous one's tokens are back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.scheduler.adapter_slots import AdapterSlots
from app.engine.scheduler.chunk_grants import ChunkGrants
from app.engine.scheduler.deadlines import Deadlines, missed
from app.engine.scheduler.draft_grants import grant_drafts
from app.engine.scheduler.encoder_share import EncoderRules, create_share
from app.engine.scheduler.loading import LoadingRequests
from app.engine.scheduler.micro_batches import micro_batch
from app.engine.scheduler.output_updater import OutputUpdater
from app.engine.scheduler.pending_diffs import PendingDiffs
from app.engine.scheduler.priority_ranks import PriorityRanks
from app.engine.scheduler.prompt_time import PromptTime
from app.engine.scheduler.row_draft_lengths import create_lengths
from app.engine.scheduler.row_table import IntArray, RowTable
from app.engine.scheduler.slots import Slots
from app.engine.scheduler.starts import Start, Starts
from app.engine.scheduler.statistics import Statistics
from app.engine.scheduler.steady_decode import SteadyDecode
from app.engine.scheduler.step_plan import MOST_WHOLE_PROMPTS, StepPlan, TokenBudget
from app.engine.scheduler.step_writer import StepWriter
from app.engine.scheduler.waiting_queue import WaitingQueue
from app.records.outputs import EngineOutput, FinishReason
from app.records.request_state import Request, RequestStatus
from app.records.stats import EngineStats, StatsRecorder, StepStats
from app.records.step import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger("manta.engine")

RESUMED_BEFORE = 1 << 62  # in the order of service, whom a request overtakes that comes from another replica
MAX_PREEMPTIONS_NOTED = 16  # of one request, with their times


@dataclass(slots=True, frozen=True)
class StepRules:
    """Bounds and shapes the steps of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    by_priority: bool = False
    whole_prompts: bool = False  # the model computes a prompt in one step
    draft_counts: tuple[int, ...] = ()  # that rows may have in a step beside none; (): nobody proposes any
    drafts_by_cost: bool = False  # their number follows the cost; else it is the last of them
    drafts_by_row: bool = False  # then rows may have fewer than others, as a step takes as long as it has tokens
    num_draft_slots: int = 0  # behind a row's computed tokens that they propose with, where there are free blocks
    num_stages: int = 1  # the pipeline's
    max_adapters: int = 0  # that rows may compute with
    encoders: EncoderRules | None = None  # None: the model sees nothing
    prompt_time: PromptTime = field(default_factory=PromptTime)


class Scheduler:
    """All requests of an engine: who runs, who waits, what the next step message says."""

    def __init__(
        self,
        kv: KVCacheManager,
        rules: StepRules,
        eos_token_ids: tuple[int, ...] = (),
        recorder: StatsRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kv = kv
        self.rows = RowTable(rules.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.deadlines = Deadlines()
        self._statistics = Statistics(recorder)
        output_lengths = self._statistics.output_lengths
        self.waiting = WaitingQueue(kv.num_known_tokens, lambda: output_lengths.average)
        self._ranks = PriorityRanks() if rules.by_priority else None
        self._rules = rules
        self._clock = clock
        each = rules.max_num_batched_tokens
        self._drafts = create_lengths(
            rules.draft_counts, self.rows, each, by_cost=rules.drafts_by_cost, by_row=rules.drafts_by_row
        )
        self._pending_diffs = PendingDiffs()
        self._output_updater = OutputUpdater(self.rows, kv, self._pending_diffs, eos_token_ids, self.finish, clock)
        self._loading = LoadingRequests(self.rows)
        self._slots = Slots(self.rows, kv, self._pending_diffs, self._preempt)
        self.adapters = AdapterSlots(rules.max_adapters, self._preempt) if rules.max_adapters else None
        self._encoders = create_share(rules.encoders)
        self._chunks = ChunkGrants(self.rows, kv, self._slots, self._encoders)
        self._starts = Starts(self.waiting, self.rows, kv, self._slots, self._chunks, self.adapters)
        self._writer = StepWriter(self.rows, kv, self._pending_diffs, drafts=self._drafts is not None)
        self._steady: SteadyDecode | None = None  # the last step, if the next one is likely to be another like it
        self._last_returned = 0
        self._num_added = 0
        self._failed: list[EngineOutput] = []  # final outputs of requests that could not be scheduled

    # ---- requests come and go

    @property
    def max_step_tokens(self) -> int:
        """Most tokens in one step."""
        return self._rules.max_num_batched_tokens

    def add(self, request: Request) -> None:
        """Take a request in; its id must be new."""
        assert request.request_id not in self.requests
        self._num_added += 1
        # One that was cut off elsewhere has had its turn already: its client is waiting for the next token.
        request.number = self._num_added
        request.key = self._num_added - (RESUMED_BEFORE if request.num_resumed_tokens else 0)
        request.queued = self._clock()
        self.requests[request.request_id] = request
        if self._ranks is not None:
            self._ranks.join(request)
        self.waiting.push(request, request.queued)
        if self.adapters is not None:
            self.adapters.add_waiting(request)
        self.deadlines.add(request, len(self.requests))

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests early; ids that are not here (any more) are ignored."""
        found = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        return [self.finish(request, "abort") for request in found if not request.is_finished]

    def end_late(self) -> list[EngineOutput]:
        """End the requests whose deadline has passed."""
        late = self.deadlines.take_late(self._clock())
        outputs = [self.finish(request, "error", error=missed(request)) for request in late]
        for output in outputs:
            output.is_late = True
        return outputs

    def set_paused(self, request_id: str, paused: bool) -> None:
        """Hold a request (a slow client) or let it go on; tokens in flight still arrive."""
        request = self.requests.get(request_id)
        if request is None or request.paused == paused:
            return
        self._statistics.num_paused += 1 if paused else -1
        if request.row >= 0:
            request.paused = paused
            self.rows.set_runnable(request.row, not paused and not request.is_loading)
        else:
            self.waiting.set_paused(request, paused)

    def finish(
        self, request: Request, reason: FinishReason, *, stop_reason: int | None = None, error: str | None = None
    ) -> EngineOutput:
        """End a request, wherever it is, and return its final output (without tokens). Happens once a request (I7)."""
        assert not request.is_finished
        if request.row >= 0:
            self._leave_row(request)
        else:
            self.waiting.remove(request)
            if self.adapters is not None:
                self.adapters.remove_waiting(request)
            self.kv.free(request, None)
        if self._ranks is not None:
            self._ranks.leave(request)
        request.status = RequestStatus.FINISHED
        self.waiting.settle(request)
        self._statistics.num_paused -= request.paused
        del self.requests[request.request_id]
        self._statistics.count_end(request, reason, self._clock())
        return EngineOutput(
            request.request_id,
            [],
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            num_cached_tokens=request.num_cached_tokens,
            num_right_drafts=request.num_right_drafts,
            num_wrong_drafts=request.num_wrong_drafts,
            num_preemptions=request.num_preemptions,
            times=request.times,
        )

    def _leave_row(self, request: Request) -> int:
        """Free row and blocks; blocks that a step in flight may write stay out of the pool until it returned."""
        last_step = int(self.rows.last_step[request.row])
        if request.is_loading:
            self._loading.leave(int(self.rows.generation[request.row]), request)
        if self.adapters is not None:
            self.adapters.leave(request)
        self._pending_diffs.leave_row(self.rows.leave(request))
        last_write = max(last_step, request.load_step)
        self.kv.free(request, last_write if last_write > self._last_returned else None)
        return last_step

    # ---- what is left to do

    @property
    def num_unreturned(self) -> int:
        """Step messages whose output has not come back."""
        return len(self._writer.in_flight)

    def has_work(self) -> bool:
        """True if a step can bring anything: a step message is out, or a request is not held by its client."""
        if self._writer.in_flight or self._failed:
            return True
        return len(self.requests) > self._statistics.num_paused

    def has_step_waiting(self) -> bool:
        """True if what waits fills a step, whoever comes."""
        load, rules = self.waiting.load, self._rules
        most = min(rules.max_num_seqs, MOST_WHOLE_PROMPTS) if rules.whole_prompts else rules.max_num_seqs
        return load.num_requests >= most or load.to_compute >= rules.max_num_batched_tokens

    def running_s(self) -> float:
        """Seconds that the step which is out takes, by those before it; 0: not known, or prompts are left to plan."""
        step, costs = self._writer.in_flight[-1], self._statistics.costs
        if len(self.waiting) or (self.rows.pending() > 1).any():
            return 0.0
        prompts_s = (step.num_tokens - step.num_decode_tokens) * costs.prefill_token_s
        return prompts_s + (costs.decode_step_s if step.num_decode_tokens else 0.0)

    # ---- scheduling

    def schedule(self) -> SchedulerOutput | None:
        """The next step message, or None when nothing can be computed before more has come back."""
        step_message = self._next_steady_step() or self._plan_step(in_turns=self._rules.num_stages > 1)
        if step_message is not None or self._writer.in_flight:
            return step_message
        # Nothing is out that could bring a block back. The request of the highest rank can always go on, but its turn
        # may be another micro-batch's, while the rows of this one lack blocks and may take none from it.
        step_message = self._plan_step() if self._rules.num_stages > 1 else None
        if step_message is None and self._loading.release_all():
            step_message = self._plan_step()
        return step_message

    def _next_steady_step(self) -> SchedulerOutput | None:
        """The fast path: the rows of the last step once more; None: the step needs a plan."""
        steady, self._steady = self._steady, None
        if steady is None or len(self.waiting) or not steady.goes_on(self.rows):
            return None
        is_due = self._drafts is not None and self._drafts.is_due()
        if is_due or not self._slots.grow_each(steady.at_block_edge()):
            return None
        self._steady = steady
        return self._writer.write_next(steady)

    def _plan_step(self, in_turns: bool = False) -> SchedulerOutput | None:
        """A step message of what can be computed now; `in_turns`: of the decodes, one micro-batch of the pipeline."""
        plan = StepPlan(TokenBudget(self._rules.max_num_batched_tokens, whole_prompts=self._rules.whole_prompts))
        pending = self.rows.pending()
        ready = np.flatnonzero(pending == 1)
        if in_turns:
            ready = micro_batch(
                ready, self.rows.last_step, self._writer.next_step_id, self._last_returned, self._rules.num_stages
            )
        decodes = self._slots.grant_decodes(ready, plan)
        plan.has_decodes = bool(decodes.size)
        if self._drafts is not None:
            plan.num_proposed = self._drafts.choose(decodes)
        behind = np.flatnonzero((pending > 1) & self.rows.runnable)  # some may just have been preempted
        if behind.size or len(self.waiting):
            self._plan_prompts(behind, int(pending[behind].sum()), int(decodes.size), plan)
            if plan.preempted:
                decodes = decodes[self.rows.runnable[decodes]]
        elif decodes.size and decodes.size == ready.size and self._may_repeat(decodes, plan):
            step_message = self._writer.write(decodes, plan, is_alone=True)
            self._steady = self._writer.remember()
            return step_message
        if self._drafts is not None:
            decodes = grant_drafts(decodes, plan, self.rows, self._slots, self._rules.num_draft_slots)
        if not decodes.size and not plan.chunks:
            return None
        return self._writer.write(decodes, plan, is_alone=not len(self.waiting))

    def _plan_prompts(self, behind: IntArray, to_compute: int, num_decodes: int, plan: StepPlan) -> None:
        """Chunks for the rows that are `behind`, of which so many tokens are to compute, and for waiting requests."""
        is_crowded, costs = behind.size + len(self.waiting) > 1, self._statistics.costs
        most = self._rules.prompt_time.most_tokens(
            costs.prefill_token_s,
            costs.decode_step_s if plan.has_decodes else 0.0,
            backlog=to_compute + self.waiting.load.to_compute,
            is_alone=not is_crowded and not plan.has_decodes,
            room=plan.budget.left,
            first=to_compute or next((one.num_tokens for one in self.waiting.first(1)), 0),
            num_decodes=num_decodes,
        )
        plan.budget.limit(most)
        plan.budget.open_prefills(is_crowded)
        self._encoders.begin_plan()
        self._chunks.grant_running(behind, plan)
        if not plan.preempted:  # while running requests lack blocks, nobody new gets in
            self._admit_waiting(plan)
        self._chunks.spend_rest(plan)

    def _may_repeat(self, decodes: IntArray, plan: StepPlan) -> bool:
        """True if the next step may be of the same rows, one token each: no pipeline, no drafts."""
        if self._rules.num_stages > 1 or self._drafts is None:
            return self._rules.num_stages == 1
        rows = self.rows
        return not (plan.num_proposed and rows.may_draft[decodes].any()) and not rows.num_drafts[decodes].any()

    @property
    def has_failed(self) -> bool:
        """True if `take_failed` has something."""
        return bool(self._failed)

    def take_failed(self) -> list[EngineOutput]:
        """Final outputs of requests that failed while a step was scheduled."""
        failed, self._failed = self._failed, []
        return failed

    def flush_message(self) -> SchedulerOutput:
        """An empty step message that brings back every output still on the device; it expects none of its own."""
        return self._writer.flush()

    def _admit_waiting(self, plan: StepPlan) -> None:
        for start in self._starts.of_step(plan, self._last_returned):
            try:
                self._admit(start, plan)
            except Exception as error:  # one request's trouble (I7)
                logger.exception("request %s cannot be scheduled", start.request.request_id)
                self._failed.append(self.finish(start.request, "error", error=f"internal error: {error}"))

    def _admit(self, start: Start, plan: StepPlan) -> None:
        """Give a waiting request a row and its first chunk; that waits for what it loads, if others compute."""
        request, computed = start.request, start.num_computed
        admitted = self.kv.admit(request, start.hit, computed + start.room)
        assert admitted
        chunk = self._chunks.cut(request, computed, computed + start.chunk) - computed
        self.rows.enter(request, computed, self.kv.num_slots(request), self.kv.next_publish(request))
        if self.adapters is not None:
            self.adapters.enter(request)
        now = self._clock()
        self.waiting.load.note_start(request, self._statistics.work_costs(self.rows), start.remaining, now)
        self.waiting.take(request)
        self._pending_diffs.enter_row(request, computed)
        if request.first_scheduled is None:
            request.first_scheduled = now
            if not request.num_resumed_tokens:  # else its client has been told of the first replica's
                request.num_cached_tokens = computed
                request.num_loaded_tokens = start.hit.num_loads * self.kv.block_size
            self._statistics.count_prefix_hit(request, computed)
        request.status = RequestStatus.RUNNING
        if self._ranks is not None:
            self._ranks.join(request)
        if start.waits:
            self._loading.add(request, self._writer.next_step_id)
            return
        plan.chunks[request] = chunk
        plan.budget.spend(chunk, start.remaining)

    # ---- preemption

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Back to its place in the queue; it will recompute what the prefix cache does not hold by then."""
        generation = int(self.rows.generation[request.row])
        last_step = self._leave_row(request)
        if last_step > self._last_returned:
            request.resume_after_step = last_step
            self._output_updater.keep_preempted(generation, request)
        if self._ranks is not None:
            self._ranks.leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        if len(request.preempted_at) < MAX_PREEMPTIONS_NOTED:
            request.preempted_at.append(self._clock())
        self._statistics.count_preemption()
        plan.preempted = True
        plan.chunks.pop(request, None)
        self._encoders.drop(request)
        self.waiting.push(request, self._clock())
        if self.adapters is not None:
            self.adapters.add_waiting(request)

    def preempt_all(self) -> None:
        """Every request back into the queue; what it computed so far is computed again. No step is out."""
        assert not self._writer.in_flight, "steps in flight"
        for request in self.rows.occupants():
            self._preempt(request, StepPlan(TokenBudget(0)))
        self._encoders.forget()

    # ---- outputs

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in what a step brought; outputs of steps come in their order, an empty step message may bring none."""
        self._statistics.figures.take(output.figures)  # a flush may bring some, too
        while self._writer.in_flight and self._writer.in_flight[0].step_id < output.step_id:
            missing = self._writer.in_flight.popleft()
            raise RuntimeError(f"the workers returned step {output.step_id} but never step {missing.step_id}")
        if not self._writer.in_flight or self._writer.in_flight[0].step_id > output.step_id:
            assert not len(output.sampled_token_ids), f"tokens from step {output.step_id}, which asked for none"
            return []
        step_message = self._writer.in_flight.popleft()
        self._last_returned = step_message.step_id
        self.kv.pool.release_until(step_message.step_id)
        self._loading.release_done(step_message.step_id, output.loading_since)
        stats = StepStats(step_message.num_tokens, 0, 0, 0, output.step_time_s, output.tokens_s)
        rejected = step_message.rejected(output)
        if self._drafts is not None:
            self._statistics.count_drafts(step_message, rejected)
            self._drafts.observe(step_message, step_message.accepted(rejected), output.tokens_s)
        outputs = self._output_updater.update_from_output(step_message, output, rejected, stats)
        self.waiting.load.refresh()
        stats.measured = self.kv.pool.residency.take_samples()
        stats.num_running, stats.num_waiting = self.rows.num_occupied, len(self.waiting)
        decodes, usual_s = step_message.num_decode_tokens, self._statistics.costs.decode_step_s
        self._rules.prompt_time.observe(step_message.num_tokens - decodes, decodes, stats.tokens_s, usual_s)
        self._statistics.count_step(stats, decodes)
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot; callable from any thread."""
        return self._statistics.snapshot(self.rows, self.waiting, self.kv, self.adapters)
