"""Turns what a step brought back into outputs: the second half of the scheduler, after a letter has returned.

Tokens return one or more letters after they were scheduled (I2), so each letter in flight remembers which requests
sat in its rows, by ticket. A request that was preempted meanwhile still gets its tokens; for one that has ended they
are dropped. The usual token costs one append and one output; only flagged ones take the careful path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.outputs import EngineOutput, FinishReason, PooledResult
from app.engine.request import Request
from app.engine.scheduler.row_table import NEVER, RowTable, needs_care
from app.engine.scheduler.stopping import check_stop, grammar_ends
from app.engine.stats import StepStats
from app.engine.step import Float32Array, ModelRunnerOutput, TokenLogprobs
from app.engine.structured.matcher import GrammarFailure

logger = logging.getLogger("manta.engine")


@dataclass(slots=True)
class InFlightLetter:
    """A submitted step: rows, tokens and the tickets of the requests that sat in the rows."""

    step_id: int
    rows: NDArray[np.int32]  # [R]
    num_scheduled_tokens: NDArray[np.int32]  # [R]
    samples: NDArray[np.bool_]  # [R]
    tickets: NDArray[np.int64]  # [R]
    num_tokens: int
    num_decodes: int


class FinishRequest(Protocol):
    """`Scheduler.finish`: takes a request out of everything and writes its final output."""

    def __call__(
        self, request: Request, reason: FinishReason, *, stop_reason: int | None = None, error: str | None = None
    ) -> EngineOutput:
        """End `request` once (I7)."""


class Reconciler:
    """Appends tokens, publishes full blocks, ends requests."""

    def __init__(
        self,
        rows: RowTable,
        kv: KVCacheManager,
        eos_token_ids: tuple[int, ...],
        finish: FinishRequest,
        clock: Callable[[], float],
    ) -> None:
        self._rows = rows
        self._kv = kv
        self._eos_token_ids = eos_token_ids
        self._finish = finish
        self._clock = clock
        # Their last token is text, not a sign of the end, so it does not come with the end.
        self._ended_by_grammar: list[Request] = []
        self._departed: dict[int, Request] = {}  # ticket -> preempted request with tokens in flight

    def request_departed(self, ticket: int, request: Request) -> None:
        """A request was preempted with letters in flight: its tokens are still wanted."""
        self._departed[ticket] = request

    def reconcile(self, letter: InFlightLetter, output: ModelRunnerOutput, stats: StepStats) -> list[EngineOutput]:
        """New tokens of the step's requests, in the order of the letter's rows."""
        rows, now = letter.rows, self._clock()
        present = self._rows.ticket[rows] == letter.tickets
        all_present = bool(present.all())
        self._confirm(rows if all_present else rows[present], letter, None if all_present else present)
        if output.prompt_logprobs:
            for index, (position, entries) in output.prompt_logprobs.items():
                self._keep_prompt_logprobs(letter, index, position, entries)
        if output.pooled is not None:
            return self._deliver_pooled(letter, present, output.pooled, stats, now)
        sampled = rows[letter.samples]
        tokens = output.sampled_token_ids
        assert len(sampled) == len(tokens), f"step {letter.step_id}: {len(tokens)} tokens for {len(sampled)} rows"
        logprobs = output.logprobs
        if all_present:
            outputs = self._deliver_present(sampled, tokens, logprobs, stats, now)
        else:
            outputs = self._deliver_mixed(letter, present, sampled, tokens, logprobs, stats, now)
        if self._ended_by_grammar:
            ended, self._ended_by_grammar = self._ended_by_grammar, []
            outputs += [self._finish(request, "stop") for request in ended]
        return outputs

    def _deliver_pooled(
        self,
        letter: InFlightLetter,
        present: NDArray[np.bool_],
        pooled: list[Float32Array],
        stats: StepStats,
        now: float,
    ) -> list[EngineOutput]:
        """Prompts that are computed end with their results. One that was preempted meanwhile is computed again."""
        assert len(pooled) == int(letter.samples.sum()), f"step {letter.step_id}: {len(pooled)} results"
        outputs: list[EngineOutput] = []
        ended = zip(letter.rows[letter.samples].tolist(), present[letter.samples].tolist(), pooled, strict=True)
        for row, is_here, result in ended:
            if not is_here:
                continue
            request = self._rows.request_at(row)
            request.first_token = request.last_token = now
            stats.ttft_s.append(now - request.arrival)
            stats.num_prompt_tokens += request.num_prompt_tokens
            output = self._finish(request, "stop")
            output.pooled = PooledResult.of(result)
            output.queue_time_s = (request.first_scheduled or now) - request.queued
            outputs.append(output)
        for ticket in letter.tickets[~present].tolist():
            self._departed.pop(ticket, None)
        return outputs

    def _confirm(self, rows: NDArray[np.int32], letter: InFlightLetter, present: NDArray[np.bool_] | None) -> None:
        """Count what the letter computed and publish blocks that it filled; their tokens are known by now."""
        table, counts = self._rows, letter.num_scheduled_tokens
        confirmed = table.num_confirmed[rows] + (counts if present is None else counts[present])
        table.num_confirmed[rows] = confirmed
        full = rows[confirmed >= table.next_publish[rows]]
        for row in full.tolist():
            request = table.request_at(row)
            self._kv.publish(request, int(table.num_confirmed[row]))
            table.next_publish[row] = self.next_publish(request)

    def next_publish(self, request: Request) -> int:
        """Computed tokens at which the request's next block is full."""
        if not self._kv.enable_prefix_caching:
            return int(NEVER)
        return (request.num_published_blocks + 1) * self._kv.block_size

    def _deliver_present(
        self,
        sampled: NDArray[np.int32],
        tokens: NDArray[np.int32],
        logprobs: list[TokenLogprobs | None] | None,
        stats: StepStats,
        now: float,
    ) -> list[EngineOutput]:
        """The fast road: every sampled row still belongs to the request that was scheduled in it."""
        table = self._rows
        known = table.num_known[sampled] + 1
        table.num_known[sampled] = known
        last = table.last_token_time[sampled]
        stats.itl_s = now - last[last > 0]
        table.last_token_time[sampled] = now
        stats.num_generation_tokens += len(sampled)
        flags = table.careful[sampled] | (known > table.limit[sampled])
        for eos in self._eos_token_ids:
            flags |= (tokens == eos) & table.watches_eos[sampled]
        requests = table.requests
        outputs: list[EngineOutput] = []
        pairs = zip(sampled.tolist(), tokens.tolist(), flags.tolist(), strict=True)
        for index, (row, token, careful) in enumerate(pairs):
            request = requests[row]
            assert request is not None
            if careful:
                chosen = logprobs[index] if logprobs is not None else None
                outputs.append(self._deliver_carefully(request, token, chosen, stats, now))
            else:
                request.token_ids.append(token)
                outputs.append(EngineOutput(request.request_id, [token]))
        return outputs

    def _deliver_mixed(
        self,
        letter: InFlightLetter,
        present: NDArray[np.bool_],
        sampled: NDArray[np.int32],
        tokens: NDArray[np.int32],
        logprobs: list[TokenLogprobs | None] | None,
        stats: StepStats,
        now: float,
    ) -> list[EngineOutput]:
        """Some requests left their rows while the letter was in flight: split, then go the usual road."""
        here = present[letter.samples]
        kept = None if logprobs is None else [entry for entry, stays in zip(logprobs, here, strict=True) if stays]
        outputs = self._deliver_present(sampled[here], tokens[here], kept, stats, now)
        tickets = letter.tickets[letter.samples]
        for index in np.flatnonzero(~here).tolist():
            request = self._departed.get(int(tickets[index]))
            if request is None or request.is_finished:
                continue  # a token past the request's end
            chosen = logprobs[index] if logprobs is not None else None
            stats.num_generation_tokens += 1
            outputs.append(self._deliver_carefully(request, int(tokens[index]), chosen, stats, now))
        for ticket in letter.tickets[~present].tolist():
            gone = self._departed.get(ticket)
            if gone is not None and (gone.is_finished or gone.resume_after_step <= letter.step_id):
                del self._departed[ticket]
        return outputs

    def _deliver_carefully(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, stats: StepStats, now: float
    ) -> EngineOutput:
        """First tokens, last tokens, tokens with logprobs; what fails here ends this request alone (I7)."""
        try:
            request.token_ids.append(token)
            first = request.first_token is None
            if first:
                request.first_token = now
                stats.ttft_s.append(now - request.arrival)
                stats.num_prompt_tokens += request.num_prompt_tokens
            request.last_token = now
            prompt_logprobs = self._take_prompt_logprobs(request)
            wants_logprobs = request.sampling_params.logprobs is not None
            if wants_logprobs and logprobs is None:
                raise ValueError("the step brought no logprobs")
            stop = check_stop(request)
            ends_grammar = grammar_ends(request)
            if stop is not None:
                output = self._finish(request, stop[0], stop_reason=stop[1])
            else:
                output = EngineOutput(request.request_id, [])
                if ends_grammar:
                    self._ended_by_grammar.append(request)
                if request.row >= 0:
                    self._rows.careful[request.row] = needs_care(request)
            output.new_token_ids = [token]
            if wants_logprobs and logprobs is not None:
                output.logprobs = [logprobs]
            output.prompt_logprobs = prompt_logprobs
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

    def _keep_prompt_logprobs(
        self, letter: InFlightLetter, index: int, position: int, entries: list[TokenLogprobs]
    ) -> None:
        """Store one chunk's entries; `position` is that of the first prompt token they describe."""
        ticket, row = int(letter.tickets[index]), int(letter.rows[index])
        here = int(self._rows.ticket[row]) == ticket
        request = self._rows.requests[row] if here else self._departed.get(ticket)
        if request is None or request.prompt_logprobs_delivered or request.sampling_params.prompt_logprobs is None:
            return
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None] * request.num_prompt_tokens
        entries = entries[: request.num_prompt_tokens - position]
        request.prompt_logprobs[position : position + len(entries)] = entries

    def _take_prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None] | None:
        """The whole prompt's entries, once, with the first token: then every chunk has been computed."""
        if request.sampling_params.prompt_logprobs is None or request.prompt_logprobs_delivered:
            return None
        request.prompt_logprobs_delivered = True
        found, request.prompt_logprobs = request.prompt_logprobs, None
        complete = found or [None] * request.num_prompt_tokens
        if any(entry is None for entry in complete[1:]):
            raise ValueError("the steps brought no logprobs for a part of the prompt")
        return complete
