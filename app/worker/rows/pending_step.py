"""A step that was enqueued: its results on their way to the host (I2).

On a GPU the results are copied by a side stream into pinned memory, so that the next step computes meanwhile; on a
CPU they are there already.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.platforms import platform_of
from app.records.step import ModelRunnerOutput, ProposedDrafts, TokenLogprobs
from app.worker.rows.logprobs import LogprobTensors

HOST = torch.device("cpu")  # made once: to read the name takes as long as the copy


@dataclass(slots=True, frozen=True)
class PromptPiece:
    """Logprobs of some consecutive prompt tokens of one request."""

    index: int  # into the step message's rows
    first_position: int
    count: int  # most likely tokens a position
    tensors: LogprobTensors


@dataclass(slots=True, frozen=True)
class PooledRows:
    """Holds what was made of prompts, for some of the N rows that sample: one tensor for all that are alike."""

    num_rows: int  # N
    parts: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)  # rows n of the N, fp32 [n, ...]

    def arrays(self) -> list[NDArray[np.float32] | None]:
        """Each row's own, [N]; the tensors are on the host."""
        found: list[NDArray[np.float32] | None] = [None] * self.num_rows
        for rows, values in self.parts:
            for row, value in zip(rows, values.numpy(), strict=True):
                found[row] = value
        return found


@dataclass(slots=True)
class StepResults:
    """Holds what a step computed, on the device. Kept until the copies are done, so that the memory is not reused.

    With drafts there is a token for each of the L logits rows, of which a request gets the first few."""

    step_id: int
    sampled_token_ids: torch.Tensor  # int64 [N], or [L]
    logprobs: LogprobTensors | None = None
    logprob_indices: list[int] = field(default_factory=list)
    logprob_counts: list[int] = field(default_factory=list)
    prompt_pieces: list[PromptPiece] = field(default_factory=list)
    token_figures: dict[str, torch.Tensor] = field(default_factory=dict)  # fp32 [N], or [L]; see ModelRunnerOutput
    pooled: PooledRows | None = None  # of the rows that sample; see ModelRunnerOutput
    num_sampled: torch.Tensor | None = None  # int64 [N] tokens that each row gets; None: one
    num_logits: NDArray[np.int64] | None = None  # [N] of how many
    draft_indices: NDArray[np.int32] | None = None  # see ProposedDrafts
    drafts: torch.Tensor | None = None  # int32 [G, P]
    apart: tuple[StepClock, ...] = ()  # times of what the step did beside its tokens
    is_static: bool = False  # the tensors are those of a static step, which the next one overwrites


class StepClock:
    """Time of a step: on a GPU between two events on its stream, else on the host."""

    def __init__(self, runtime: Any) -> None:
        """`runtime`: Platform.runtime of the device."""
        self._start: torch.Event | None = None if runtime is None else runtime.Event(enable_timing=True)
        self.end: torch.Event | None = None if runtime is None else runtime.Event(enable_timing=True)
        self._elapsed_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin now: what came before is not counted."""
        self._started_at = time.perf_counter()
        if self._start is not None:
            self._start.record()

    def stop(self) -> None:
        """All work of the step is enqueued (GPU) or done (CPU)."""
        self._elapsed_s = time.perf_counter() - self._started_at
        if self.end is not None:
            self.end.record()

    def elapsed_s(self) -> float:
        """Seconds; on a GPU only once the step has finished."""
        if self._start is None or self.end is None:
            return self._elapsed_s
        return float(self._start.elapsed_time(self.end)) / 1000.0


@dataclass(slots=True, frozen=True)
class CopyStream:
    """Copies results beside the next step."""

    runtime: Any  # Platform.runtime
    stream: Any

    @classmethod
    def of(cls, device: torch.device) -> CopyStream | None:
        """One of the device's; None where results are on the host already."""
        runtime = platform_of(device).runtime
        return None if runtime is None else cls(runtime, runtime.Stream(device))


class PendingStep:
    """Starts the copies when made; `finish` waits for them."""

    def __init__(self, results: StepResults, clock: StepClock, copy: CopyStream | None) -> None:
        self._results = results
        self._clock = clock
        self._copied: torch.Event | None = None
        if results.is_static:  # the copy is part of the step
            self._host = _to_host(results, pins=copy is not None)
            clock.stop()
            self._copied = clock.end
            return
        clock.stop()
        if copy is None:
            self._host = results
            return
        copy.stream.wait_stream(copy.runtime.current_stream())
        with copy.runtime.stream(copy.stream):
            self._host = _to_host(results, pins=True)
            self._copied = copy.runtime.Event()
            self._copied.record()

    def is_done(self) -> bool:
        """True if `finish` would not wait."""
        return self._copied is None or bool(self._copied.query())

    def finish(self) -> ModelRunnerOutput:
        """The step's output; waits for the device where it must."""
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host
        tokens, logprobs, num_sampled = host.sampled_token_ids.numpy().astype(np.int32), _sampled_logprobs(host), None
        figures = {name: values.numpy() for name, values in host.token_figures.items()}
        if host.num_sampled is not None:
            num_sampled, kept = host.num_sampled.numpy().astype(np.int32), _kept(host)
            tokens = tokens[kept]
            figures = {name: values[kept] for name, values in figures.items()}
            logprobs = None if logprobs is None else [logprobs[index] for index in kept.tolist()]
        return ModelRunnerOutput(
            step_id=host.step_id,
            sampled_token_ids=tokens,
            num_sampled_tokens=num_sampled,
            logprobs=logprobs,
            token_figures=figures,
            prompt_logprobs=_prompt_logprobs(host),
            drafts=None if host.drafts is None else _drafts(host.draft_indices, host.drafts),
            step_time_s=self._clock.elapsed_s(),
            apart_s=sum(clock.elapsed_s() for clock in self._results.apart),
            pooled=None if host.pooled is None else host.pooled.arrays(),
        )


def _drafts(indices: NDArray[np.int32] | None, token_ids: torch.Tensor) -> ProposedDrafts:
    assert indices is not None
    return ProposedDrafts(indices, token_ids.numpy())


def _kept(results: StepResults) -> NDArray[np.int64]:
    """[T] indices of the tokens that rows get, among the logits rows."""
    assert results.num_sampled is not None
    assert results.num_logits is not None
    first = np.cumsum(results.num_logits) - results.num_logits
    place = np.arange(results.num_logits.sum()) - np.repeat(first, results.num_logits)
    return np.flatnonzero(place < np.repeat(results.num_sampled.numpy(), results.num_logits))


def _sampled_logprobs(results: StepResults) -> list[TokenLogprobs | None] | None:
    if results.logprobs is None:
        return None
    spread: list[TokenLogprobs | None] = [None] * len(results.sampled_token_ids)
    for index, entry in zip(results.logprob_indices, results.logprobs.tolist(results.logprob_counts), strict=True):
        spread[index] = entry
    return spread


def _prompt_logprobs(results: StepResults) -> dict[int, tuple[int, list[TokenLogprobs]]] | None:
    if not results.prompt_pieces:
        return None
    found: dict[int, tuple[int, list[TokenLogprobs]]] = {}
    for piece in results.prompt_pieces:  # in order of position
        _, entries = found.setdefault(piece.index, (piece.first_position, []))
        entries.extend(piece.tensors.tolist([piece.count] * len(piece.tensors.ranks)))
    return found


def _to_host(results: StepResults, *, pins: bool) -> StepResults:
    """Copies on the host, which on a GPU are under way yet (`pins`)."""
    return StepResults(
        results.step_id,
        _copy(results.sampled_token_ids, pins),
        None if results.logprobs is None else _copy_logprobs(results.logprobs, pins),
        results.logprob_indices,
        results.logprob_counts,
        [
            PromptPiece(p.index, p.first_position, p.count, _copy_logprobs(p.tensors, pins))
            for p in results.prompt_pieces
        ],
        {name: _copy(values, pins) for name, values in results.token_figures.items()},
        None if results.pooled is None else _copy_pooled(results.pooled, pins),
        None if results.num_sampled is None else _copy(results.num_sampled, pins),
        results.num_logits,
        results.draft_indices,
        None if results.drafts is None else _copy(results.drafts, pins),
    )


def _copy(tensor: torch.Tensor, pins: bool) -> torch.Tensor:
    return torch.empty_like(tensor, device=HOST, pin_memory=pins).copy_(tensor, non_blocking=True)


def _copy_pooled(pooled: PooledRows, pins: bool) -> PooledRows:
    return PooledRows(pooled.num_rows, [(rows, _copy(values, pins)) for rows, values in pooled.parts])


def _copy_logprobs(tensors: LogprobTensors, pins: bool) -> LogprobTensors:
    return LogprobTensors(_copy(tensors.token_ids, pins), _copy(tensors.logprobs, pins), _copy(tensors.ranks, pins))
