"""One step on the device: inputs, forward pass, logits, tokens.

A sampled token goes straight into its row's token ids on the device, so the next letter may arrive before anyone has
read this one's output (I2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.distributed.parallel_groups import ParallelGroups
from app.engine.distributed.stage_link import StageLink
from app.engine.layers.context import ForwardContext
from app.engine.logits_processors.base import SamplingStep
from app.engine.models.decoder import CausalLM
from app.engine.sampling.sampler import Sampler
from app.engine.step import SchedulerOutput
from app.engine.worker.cascade_choice import CascadeChoice
from app.engine.worker.features.prompt_logprobs import PromptLogprobs
from app.engine.worker.features.token_feedback import TokenFeedback
from app.engine.worker.graphs.decode_step import Decode, DecodeStep
from app.engine.worker.input_batch import build_input_batch, check_rows
from app.engine.worker.pending_step import PendingStep, StepClock, StepResults
from app.engine.worker.row_state import RowState
from app.kernels.attention import AttentionMetadata


class ModelRunner:
    """Executes letters one after another. Callers hold torch.inference_mode()."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[torch.Tensor],
        state: RowState,
        vocab_size: int,
        device: torch.device,
        link: StageLink | None = None,  # to the other pipeline stages; None: there are none
    ) -> None:
        self.kv_caches = kv_caches
        self._model = model
        self._state = state
        self._device = device
        self._sampler = Sampler(len(state.num_tokens), vocab_size, device)
        self._prompt_logprobs = PromptLogprobs(vocab_size)
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._attention = model.attention_layers[0]
        self.link = link or StageLink(ParallelGroups(), 0, torch.float32, device, 0)
        self._feedback = TokenFeedback(self.link, state) if self.link.is_first and not self.link.is_last else None
        self._vocab_size = vocab_size
        self.cascade: CascadeChoice | None = None  # None: no step reads shared prefixes once
        self.decode: Decode | None = None  # how steps that only decode run; None: as all others

    def static_step(self, sizes: Sequence[int], dtype: torch.dtype, cascade_sizes: Sequence[int] = ()) -> DecodeStep:
        """A decode step over static tensors, for `decode`."""
        return DecodeStep(self, self._state, self._vocab_size, dtype, sizes, cascade_sizes)

    def execute(self, letter: SchedulerOutput) -> PendingStep:
        """Compute (on a GPU: enqueue) the letter's step."""
        clock = StepClock(self._device)
        self._apply(letter)
        if len(letter.rows) == 0:
            none = torch.empty(0, dtype=torch.int64, device=self._device)
            return PendingStep(StepResults(letter.step_id, none), clock, self._copy_stream)
        if self.decode is not None and _is_decode(letter) and self.decode.size_for(len(letter.rows)) is not None:
            results = self._static(letter, self.decode)
        else:
            results = self._dynamic(letter)
        self._state.advance(letter)
        return PendingStep(results, clock, self._copy_stream)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        """`compute`, between what comes from the stage before and what goes to the next one."""
        hidden = self.compute(input_ids, positions, attention, self.link.receive_hidden(len(positions)))
        self.link.send_hidden(hidden)
        return hidden

    def compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionMetadata,
        received: torch.Tensor | None,
    ) -> torch.Tensor:
        """int [T], or hidden states [T, C] of the stage before -> hidden states [T, C]; the tokens' keys and values go
        into the cache."""
        layer = self._attention
        layer.ops.prepare(
            attention,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=self._state.block_size,
        )
        hidden: torch.Tensor = self._model(input_ids, ForwardContext(positions, attention, self.kv_caches, received))
        return hidden

    @property
    def is_last_stage(self) -> bool:
        """Whether logits and tokens are computed here, and not in a later pipeline stage."""
        return self.link.is_last

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> fp32 [N, V]."""
        return self._model.logits(hidden)

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> [N, V] in the model's type."""
        return self._model.raw_logits(hidden)

    def _apply(self, letter: SchedulerOutput) -> None:
        """The letter's diffs, in its order: a row may be freed and given away at once."""
        if self._feedback is not None:
            self._feedback.before(letter)
        for row in letter.freed_rows:
            self._sampler.remove(row)
            self._prompt_logprobs.remove(row)
        for request in letter.new_requests:
            self._sampler.add(request)
            self._prompt_logprobs.add(request)
        self._sampler.take(letter)
        self._state.apply(letter)

    def _dynamic(self, letter: SchedulerOutput) -> StepResults:
        """A step of any mix of prefills and decodes."""
        batch = build_input_batch(letter, self._state)
        if self.cascade is not None:
            decodes = letter.rows[: batch.attention.num_decodes].astype(np.int64)
            batch.attention.cascade = self.cascade.wanted(decodes)
        hidden = self.forward(batch.input_ids, batch.positions, batch.attention)
        if not self.link.is_last:
            return self._elsewhere(letter, batch.sample_rows, batch.sample_lengths)
        if len(batch.sample_rows) == 0:
            results = StepResults(letter.step_id, torch.empty(0, dtype=torch.int64, device=self._device))
        else:
            logits = self._model.logits(hidden[batch.logits_indices])
            lengths = (batch.sample_lengths, batch.device_sample_lengths)
            results = self._sample(letter.step_id, logits, batch.sample_rows, *lengths)
            self.link.send_tokens(results.sampled_token_ids)
        if self._prompt_logprobs:
            rows = letter.rows.tolist()
            results.prompt_pieces = self._prompt_logprobs.compute(rows, batch, self._state, hidden, self._model.logits)
        return results

    def _static(self, letter: SchedulerOutput, decode: Decode) -> StepResults:
        """A step in which each row brings one token and samples: over static tensors, on a GPU from graphs."""
        step, count = decode.step, len(letter.rows)
        rows = letter.rows.astype(np.int64)
        lengths = self._state.num_computed_tokens[rows] + 1
        check_rows(self._state, rows, letter.num_scheduled_tokens, lengths, letter.samples)
        parameters = self._sampler.plain(rows)
        size = decode.size_for(count, cascade=True) if self.cascade is not None and self.cascade.wanted(rows) else None
        cascade = size is not None
        size = size or decode.size_for(count)
        assert size is not None, "the caller asked"
        step.load(rows, parameters, size)
        received = self.link.receive_hidden(count)
        if step.received is not None and received is not None:
            step.received[:count].copy_(received)
        decode.forward(size, cascade=cascade)
        if step.sent is not None:
            self.link.send_hidden(step.sent[:count].clone())  # the next step may overwrite it before it has left
            return self._elsewhere(letter, rows, lengths)
        if parameters is None:
            device_lengths = step.inputs.view(size).lengths[:count]
            results = self._sample(letter.step_id, step.logits[:count].float(), rows, lengths, device_lengths)
            self.link.send_tokens(results.sampled_token_ids)
            return results
        decode.sample(size)
        self.link.send_tokens(step.token_ids[:count])
        # Copied within the step: the next one writes to the same place.
        tokens = torch.empty(count, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return StepResults(letter.step_id, tokens.copy_(step.token_ids[:count], non_blocking=True), is_host=True)

    def _elsewhere(self, letter: SchedulerOutput, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> StepResults:
        """Of a stage that is not the last: `rows` get their tokens there."""
        if self._feedback is not None:
            self._feedback.expect(rows, lengths)
        return StepResults(letter.step_id, torch.empty(0, dtype=torch.int64, device=self._device))

    def _sample(
        self,
        step_id: int,
        logits: torch.Tensor,
        sample_rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        device_lengths: torch.Tensor,
    ) -> StepResults:
        """One token from each row of fp32 logits [N, V], which are overwritten."""
        selected = self._sampler.select(sample_rows)
        rows = selected.device_rows
        step = SamplingStep(rows, lengths, device_lengths, self._state.token_ids)
        sampled = self._sampler.sample(logits, selected, step)
        self._state.token_ids[rows, device_lengths] = sampled.token_ids.int()
        return StepResults(
            step_id, sampled.token_ids, sampled.logprobs, selected.logprob_indices, selected.logprob_counts
        )


def _is_decode(letter: SchedulerOutput) -> bool:
    return bool(letter.samples.all()) and int(letter.num_scheduled_tokens.max()) == 1
