"""The sampler: logits to one token a row.

Random numbers are counter-based and keyed by (seed, choice index, absolute position, token id), so a row's token does
not depend on the batch around it (I6). Order: raw logprobs, logits processors, then greedy or temperature, min_p,
top_k, top_p and Gumbel-argmax. A step pays only for what its own rows ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.sampling import GUMBEL_ARGMAX, LOG_SOFTMAX, SAMPLE_TOKENS, apply_min_p, apply_top_k_top_p
from app.platforms import platform_of
from app.records.step import NewRequest
from app.worker.logits_processors import create_logits_processors
from app.worker.logits_processors.base import PARAMS, LogitsProcessor, SamplingStep, brought_by
from app.worker.rows.logprobs import LogprobTensors, RawLogprobs
from app.worker.rows.step_inputs import StepInputs
from app.worker.rows.worker_feature import WorkerFeature
from app.worker.sampling.sampling_batch import RandomRows, SamplingBatch, SamplingRows


@dataclass(slots=True, frozen=True)
class SamplerOutput:
    """Tokens of the N rows, on the device."""

    token_ids: torch.Tensor  # int64 [N]
    logprobs: LogprobTensors | None  # for batch.logprob_indices


class Sampler(WorkerFeature):
    """Keeps each row's sampling state from when a request enters it until it leaves."""

    def __init__(
        self,
        inputs: StepInputs,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        plugins: Sequence[str] = (),
        *,
        exact: bool = False,
    ) -> None:
        """`inputs`: of the steps, to which it adds; `plugins`: logits processors beside ours; `exact`: what it makes of
        a row is the same to the bit whatever rows come with it."""
        self._rows = SamplingRows(inputs, max_num_seqs, vocab_size, device)
        self._processors = create_logits_processors(vocab_size, device, plugins)
        for processor in self._processors:
            processor.declare(inputs)
        self._gumbel_argmax = GUMBEL_ARGMAX.on(device, exact=exact)
        self._sample_tokens = SAMPLE_TOKENS.on(device, exact=exact)
        self._log_softmax = LOG_SOFTMAX.on(device, exact=exact)
        self._sorts = not platform_of(device).is_async and not exact  # filters sort all rows; those of a GPU need not
        self._params = [name for name in PARAMS if any(name in (one.reads or ()) for one in self._processors)]
        self._users: dict[int, list[LogitsProcessor]] = {}  # row -> the processors that its request uses
        self._selected: NDArray[np.int64] | None = None  # None: a request came or went since
        self._batch: SamplingBatch | None = None  # the selected rows
        self._asked: NDArray[np.int64] | None = None  # rows of which it is known if they are plain
        self._is_plain = False  # those

    @property
    def features(self) -> list[WorkerFeature]:
        """The logits processors in their order, then the sampler, which tells them of rows."""
        return [*self._processors, self]

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        self._selected = self._asked = None
        self._rows.add(request)
        self._drop(row)
        brought, users = brought_by(request, self._params), []
        for processor in self._processors:
            if (processor.reads is None or not processor.reads.isdisjoint(brought)) and processor.take(row, request):
                users.append(processor)
        if users:
            self._users[row] = users

    def leave(self, row: int) -> None:
        """The row was freed."""
        self._selected = self._asked = None
        self._drop(row)

    def _drop(self, row: int) -> None:
        for processor in self._users.pop(row, ()):
            processor.drop(row)

    def select(self, rows: NDArray[np.int64]) -> SamplingBatch:
        """The rows that sample in this step, in the order of their logits."""
        if self._batch is None or self._selected is None or not np.array_equal(self._selected, rows):
            self._selected, self._batch = rows, self._rows.batch(rows)
            for processor in self._processors:
                processor.select(rows)
        return self._batch

    def is_plain(self, rows: NDArray[np.int64]) -> bool:
        """True if temperature and filters are all that these rows want of the sampler, so that a captured draw can
        serve them."""
        if self._asked is None or not np.array_equal(self._asked, rows):
            wanted = any(one.serves(rows) for one in self._processors if not one.part)
            self._asked, self._is_plain = rows, not wanted and not self._rows.want_logprobs(rows)
        return self._is_plain

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, step: SamplingStep) -> SamplerOutput:
        """fp32 logits [N, V], which are overwritten, of the rows selected last."""
        raw = self._raw_logprobs(logits, batch)
        for processor in self._processors:
            if processor.active:
                processor.apply(logits, step)
        token_ids = self._choose(logits, batch.random, step)
        if raw is None:
            return SamplerOutput(token_ids, None)
        indices = batch.device_logprob_indices
        return SamplerOutput(token_ids, raw.of_chosen(token_ids if indices is None else token_ids[indices]))

    def _raw_logprobs(self, logits: torch.Tensor, batch: SamplingBatch) -> RawLogprobs | None:
        if not batch.logprob_indices:
            return None
        indices = batch.device_logprob_indices
        of_rows = logits if indices is None else logits[indices]
        return RawLogprobs.of(self._log_softmax(of_rows), max(batch.logprob_counts), batch.logprob_token_ids)

    def _choose(self, logits: torch.Tensor, random: RandomRows | None, step: SamplingStep) -> torch.Tensor:
        if random is None:
            return logits.argmax(dim=-1)
        if random.indices is None:
            return self._sample_at_random(logits, random, step.device_lengths)
        token_ids = logits.argmax(dim=-1)
        positions = step.device_lengths[random.indices]
        token_ids[random.indices] = self._sample_at_random(logits[random.indices], random, positions)
        return token_ids

    def _sample_at_random(self, logits: torch.Tensor, random: RandomRows, positions: torch.Tensor) -> torch.Tensor:
        """Overwrites logits [n, V]; returns int64 [n]."""
        filters = (random.top_k, random.top_p, random.min_p)
        if not self._sorts and any(values is not None for values in filters):
            off = torch.zeros_like(random.temperature[:, 0])
            top_k, top_p, min_p = (off if values is None else values for values in filters)
            top_p = off + 1.0 if random.top_p is None else top_p
            temperature = random.temperature[:, 0]
            return self._sample_tokens(logits, temperature, top_k.int(), top_p, min_p, random.keys, positions)[0]
        logits.div_(random.temperature)
        if random.min_p is not None:
            logits = apply_min_p(logits, random.min_p)
        if random.top_k is not None or random.top_p is not None:
            logits = apply_top_k_top_p(logits, random.top_k, random.top_p, max_top_k=random.max_top_k)
        return self._gumbel_argmax(logits, random.keys, positions)
