"""Turns what a step brought back into outputs: the second half of the scheduler, after a step has returned.

Tokens return one or more step messages after they were scheduled (I2), so each step in flight remembers which requests
sat in its rows, by the row's generation. A request that was preempted meanwhile still gets its tokens; for one that has
ended they are dropped. The usual tokens cost one append and one output; only flagged rows take the slow path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.pending_diffs import PendingDiffs
from app.engine.scheduler.row_table import RowTable, needs_slow_path
from app.engine.scheduler.sampled_tokens import SampledTokens
from app.engine.scheduler.stopping import append_tokens
from app.engine.scheduler.token_masks import take_drafts
from app.records.outputs import EngineOutput, FinishReason, PooledResult
from app.records.request_state import Request
from app.records.stats import StepStats
from app.records.step import Float32Array, Int32Array, ModelRunnerOutput, TokenLogprobs
from app.structured.matcher import GrammarFailure

logger = logging.getLogger("manta.engine")


class FinishRequest(Protocol):
    """`Scheduler.finish`: takes a request out of everything and writes its final output."""

    def __call__(
        self, request: Request, reason: FinishReason, *, stop_reason: int | None = None, error: str | None = None
    ) -> EngineOutput:
        """End `request` once (I7)."""


class OutputUpdater:
    """Appends tokens, publishes full blocks, ends requests."""

    def __init__(
        self,
        rows: RowTable,
        kv: KVCacheManager,
        diffs: PendingDiffs,
        eos_token_ids: tuple[int, ...],
        finish: FinishRequest,
        clock: Callable[[], float],
    ) -> None:
        self._rows = rows
        self._kv = kv
        self._pending_diffs = diffs
        self._eos_token_ids = eos_token_ids
        self._finish = finish
        self._clock = clock
        # Their last token is text, not a sign of the end, so it does not come with the end.
        self._ended_by_grammar: list[Request] = []
        self._preempted_in_flight: dict[int, Request] = {}  # generation -> preempted request with tokens in flight

    def keep_preempted(self, generation: int, request: Request) -> None:
        """Keep a request that was preempted with steps in flight: its tokens are still wanted."""
        self._preempted_in_flight[generation] = request

    def update_from_output(
        self, step: InFlightStep, output: ModelRunnerOutput, rejected: Int32Array | None, stats: StepStats
    ) -> list[EngineOutput]:
        """New tokens of the step's requests, in the order of the step's rows, which drafted `rejected` [R] in vain."""
        now = self._clock()
        present = self._rows.generation[step.rows] == step.generations
        self._confirm(step, present, rejected)
        if output.prompt_logprobs:
            for index, (position, entries) in output.prompt_logprobs.items():
                self._keep_prompt_logprobs(step, index, position, entries)
        if output.pooled is not None and not len(output.sampled_token_ids):
            return self._deliver_pooled(step, present, output.pooled, stats, now)
        sampled = SampledTokens.of(step, output)
        if present.all():
            outputs = self._deliver_present(sampled, stats, now)
        else:
            outputs = self._deliver_mixed(step, present, sampled, stats, now)
        if self._ended_by_grammar:
            ended, self._ended_by_grammar = self._ended_by_grammar, []
            outputs += [self._finish(request, "stop") for request in ended]
        if output.drafts is not None:
            take_drafts(self._rows, sampled.rows, step.generations[step.samples], output.drafts)
        return outputs

    def _deliver_pooled(
        self,
        step: InFlightStep,
        present: NDArray[np.bool_],
        pooled: list[Float32Array | None],
        stats: StepStats,
        now: float,
    ) -> list[EngineOutput]:
        """Prompts that are computed end with their results. One that was preempted meanwhile is computed again."""
        assert len(pooled) == int(step.samples.sum()), f"step {step.step_id}: {len(pooled)} results"
        outputs: list[EngineOutput] = []
        ended = zip(step.rows[step.samples].tolist(), present[step.samples].tolist(), pooled, strict=True)
        for row, is_here, result in ended:
            if not is_here:
                continue
            assert result is not None, f"step {step.step_id}: a prompt without a result"
            request = self._rows.request_at(row)
            self._note_first_token(request, stats, now)
            request.last_token = now
            output = self._finish(request, "stop")
            output.pooled = PooledResult.of(result)
            output.queue_time_s = (request.first_scheduled or now) - request.queued
            outputs.append(output)
        for generation in step.generations[~present].tolist():
            self._preempted_in_flight.pop(generation, None)
        return outputs

    def _confirm(self, step: InFlightStep, present: NDArray[np.bool_], rejected: Int32Array | None) -> None:
        """Count what the step computed, less the drafts that were rejected, and publish blocks that it filled with
        tokens that are known; those of its own drafts are not yet."""
        table, rows, counts = self._rows, step.rows, step.num_scheduled_tokens
        accepted = step.accepted(rejected)
        if rejected is not None:
            counts = counts - rejected
        if not present.all():
            rows, counts = rows[present], counts[present]
            rejected, accepted = (None if drafts is None else drafts[present] for drafts in (rejected, accepted))
        if rejected is not None and accepted is not None:
            table.num_right_drafts[rows] += accepted
            table.num_wrong_drafts[rows] += rejected
            table.num_tokens[rows] -= rejected
            table.num_computed[rows] -= rejected
            self._pending_diffs.reject_drafts(rows, rejected)
            table.num_changes += bool(rejected.any())  # a step of the same rows does not go on from what they had
        confirmed = table.num_confirmed[rows] + counts
        table.num_confirmed[rows] = confirmed
        full = rows[confirmed >= table.next_publish[rows]]
        for row in full.tolist():
            request = table.request_at(row)
            self._kv.publish(request, min(int(table.num_confirmed[row]), request.num_tokens))
            table.next_publish[row] = self._kv.next_publish(request)

    def _deliver_present(self, sampled: SampledTokens, stats: StepStats, now: float) -> list[EngineOutput]:
        """The fast path: every sampled row still belongs to the request that was scheduled in it."""
        table, rows = self._rows, sampled.rows
        known = table.num_known[rows] + sampled.counts
        table.num_known[rows] = known
        last = table.last_token_time[rows]
        stats.itl_s = sampled.spread((now - last) / sampled.counts, last > 0)
        table.last_token_time[rows] = now
        stats.num_generation_tokens += len(sampled.flat)
        flags = table.slow_path[rows] | (known > table.limit[rows])
        for eos in self._eos_token_ids:
            flags |= sampled.any_is(eos) & table.watches_eos[rows]
        requests = table.requests
        outputs: list[EngineOutput] = []
        pairs = zip(rows.tolist(), sampled.pieces(), flags.tolist(), strict=True)
        for index, (row, tokens, slow_path) in enumerate(pairs):
            request = requests[row]
            assert request is not None
            if slow_path:
                outputs.append(self._deliver_slow_path(request, tokens, sampled, index, stats, now))
            else:
                request.token_ids += tokens
                outputs.append(EngineOutput(request.spec.request_id, tokens))
        return outputs

    def _deliver_mixed(
        self, step: InFlightStep, present: NDArray[np.bool_], sampled: SampledTokens, stats: StepStats, now: float
    ) -> list[EngineOutput]:
        """Some requests left their rows while the step was in flight: split, then go the usual way."""
        here = present[step.samples]
        outputs = self._deliver_present(sampled.select(here), stats, now)
        generations, pieces = step.generations[step.samples], sampled.pieces()
        for index in np.flatnonzero(~here).tolist():
            request = self._preempted_in_flight.get(int(generations[index]))
            if request is None or request.is_finished:
                continue  # tokens past the request's end
            stats.num_generation_tokens += len(pieces[index])
            outputs.append(self._deliver_slow_path(request, pieces[index], sampled, index, stats, now))
        for generation in step.generations[~present].tolist():
            gone = self._preempted_in_flight.get(generation)
            if gone is not None and (gone.is_finished or gone.resume_after_step <= step.step_id):
                del self._preempted_in_flight[generation]
        return outputs

    def _deliver_slow_path(
        self,
        request: Request,
        tokens: list[int],
        sampled: SampledTokens,
        index: int,
        stats: StepStats,
        now: float,
    ) -> EngineOutput:
        """First tokens, last tokens, tokens with what is known of each (`sampled`, of its row `index`); what fails here
        ends this request alone (I7)."""
        try:
            first = request.first_token is None
            if first:
                self._note_first_token(request, stats, now)
            request.last_token = now
            appended = append_tokens(request, tokens)
            stats.num_generation_tokens -= len(tokens) - (0 if request.is_canary else appended.num_tokens)
            prompt_logprobs = self._take_prompt_logprobs(request)
            chosen = _wanted_logprobs(request, sampled.logprobs_of(index), appended.num_tokens)
            figures = _wanted_figures(request, sampled.figures_of(index), appended.num_tokens)
            if appended.stop is not None:
                output = self._finish(request, appended.stop[0], stop_reason=appended.stop[1])
            else:
                output = EngineOutput(request.request_id, [])
                if appended.ends_grammar:
                    self._ended_by_grammar.append(request)
                if request.row >= 0:
                    self._rows.slow_path[request.row] = needs_slow_path(request)
            output.new_token_ids = tokens[: appended.num_tokens]
            output.logprobs, output.token_figures = chosen, figures
            output.prompt_logprobs = prompt_logprobs
            if (aligned := sampled.pooled_of(index)) is not None:
                output.pooled = PooledResult.of(aligned)
            if first:
                output.num_cached_tokens = request.num_cached_tokens
                output.num_preemptions = request.num_preemptions
                output.queue_time_s = (request.first_scheduled or now) - request.queued
            return output
        except GrammarFailure as error:
            failed = self._finish(request, "error", error=str(error))
            failed.error_param = "structured_outputs"
            return failed
        except Exception as error:  # one request's trouble
            logger.exception("request %s failed", request.request_id)
            return self._finish(request, "error", error=f"internal error: {error}")

    def _note_first_token(self, request: Request, stats: StepStats, now: float) -> None:
        """The first one here. Prompt and time of one that comes from another replica have been counted there."""
        request.first_token = now
        if not request.num_resumed_tokens and not request.is_canary:
            stats.ttft_s.append(now - request.arrival)
            stats.add_prompt(request)

    def _keep_prompt_logprobs(
        self, step: InFlightStep, index: int, position: int, entries: list[TokenLogprobs]
    ) -> None:
        """Store one chunk's entries; `position` is that of the first prompt token they describe."""
        generation, row = int(step.generations[index]), int(step.rows[index])
        here = int(self._rows.generation[row]) == generation
        request = self._rows.requests[row] if here else self._preempted_in_flight.get(generation)
        if request is None or not request.owes_prompt_logprobs:
            return
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None] * request.num_prompt_tokens
        entries = entries[: request.num_prompt_tokens - position]
        request.prompt_logprobs[position : position + len(entries)] = entries

    def _take_prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None] | None:
        """The whole prompt's entries, once, with the first token: then every chunk has been computed."""
        if not request.owes_prompt_logprobs:
            return None
        request.owes_prompt_logprobs = False
        found, request.prompt_logprobs = request.prompt_logprobs, None
        complete = found or [None] * request.num_prompt_tokens
        if any(entry is None for entry in complete[1:]):
            raise ValueError("the steps brought no logprobs for a part of the prompt")
        return complete


def _wanted_logprobs(
    request: Request, logprobs: list[TokenLogprobs | None] | None, num_tokens: int
) -> list[TokenLogprobs] | None:
    """The first `num_tokens` entries; None: the request did not ask."""
    if not request.spec.wants_logprobs:
        return None
    wanted = [entry for entry in (logprobs or ())[:num_tokens] if entry is not None]
    if len(wanted) < num_tokens:
        raise ValueError("the step brought no logprobs")
    return wanted


def _wanted_figures(
    request: Request, figures: dict[str, list[float]], num_tokens: int
) -> dict[str, list[float]] | None:
    """Those of the first `num_tokens` tokens that the request asked for; None: it asked for none."""
    wanted = request.spec.token_figures
    if missing := [name for name in wanted if name not in figures]:
        raise ValueError(f"the step brought no {missing[0]}")
    return {name: figures[name][:num_tokens] for name in wanted} if wanted else None
