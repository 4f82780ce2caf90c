"""One step on the device: inputs, forward pass, logits, tokens.

A sampled token goes straight into its row's token ids on the device, so the next letter may arrive before anyone has
read this one's output (I2).
"""

from __future__ import annotations

import torch

from app.engine.layers.context import ForwardContext
from app.engine.logits_processors.base import SamplingStep
from app.engine.models.decoder import CausalLM
from app.engine.sampling.sampler import Sampler
from app.engine.step import SchedulerOutput
from app.engine.worker.input_batch import InputBatch, build_input_batch
from app.engine.worker.pending_step import PendingStep, StepClock, StepResults
from app.engine.worker.prompt_logprobs import PromptLogprobs
from app.engine.worker.row_state import RowState
from app.kernels.attention import AttentionMetadata


class ModelRunner:
    """Executes letters one after another. Callers hold torch.inference_mode()."""

    def __init__(
        self, model: CausalLM, kv_caches: list[torch.Tensor], state: RowState, vocab_size: int, device: torch.device
    ) -> None:
        self.kv_caches = kv_caches
        self._model = model
        self._state = state
        self._device = device
        self._sampler = Sampler(len(state.num_tokens), vocab_size, device)
        self._prompt_logprobs = PromptLogprobs(vocab_size)
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._attention = model.attention_layers[0]

    def execute(self, letter: SchedulerOutput) -> PendingStep:
        """Compute (on a GPU: enqueue) the letter's step."""
        clock = StepClock(self._device)
        self._apply(letter)
        if len(letter.rows) == 0:
            none = torch.empty(0, dtype=torch.int64, device=self._device)
            return PendingStep(StepResults(letter.step_id, none), clock, self._copy_stream)
        batch = build_input_batch(letter, self._state)
        hidden = self.forward(batch.input_ids, batch.positions, batch.attention)
        results = self._sample(letter.step_id, batch, hidden)
        if self._prompt_logprobs:
            rows = letter.rows.tolist()
            results.prompt_pieces = self._prompt_logprobs.compute(rows, batch, self._state, hidden, self._model.logits)
        self._state.advance(letter)
        return PendingStep(results, clock, self._copy_stream)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        """int [T] -> hidden states [T, C]; the tokens' keys and values go into the cache."""
        layer = self._attention
        layer.ops.prepare(
            attention,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=self._state.block_size,
        )
        hidden: torch.Tensor = self._model(input_ids, ForwardContext(positions, attention, self.kv_caches))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> fp32 [N, V]."""
        return self._model.logits(hidden)

    def _apply(self, letter: SchedulerOutput) -> None:
        """The letter's diffs, in its order: a row may be freed and given away at once."""
        for row in letter.freed_rows:
            self._sampler.remove(row)
            self._prompt_logprobs.remove(row)
        for request in letter.new_requests:
            self._sampler.add(request)
            self._prompt_logprobs.add(request)
        self._state.apply(letter)

    def _sample(self, step_id: int, batch: InputBatch, hidden: torch.Tensor) -> StepResults:
        if len(batch.sample_rows) == 0:
            return StepResults(step_id, torch.empty(0, dtype=torch.int64, device=self._device))
        selected = self._sampler.select(batch.sample_rows)
        rows, lengths = selected.device_rows, batch.device_sample_lengths
        step = SamplingStep(rows, batch.sample_lengths, lengths, self._state.token_ids)
        sampled = self._sampler.sample(self._model.logits(hidden[batch.logits_indices]), selected, step)
        self._state.token_ids[rows, lengths] = sampled.token_ids.int()
        return StepResults(
            step_id, sampled.token_ids, sampled.logprobs, selected.logprob_indices, selected.logprob_counts
        )
