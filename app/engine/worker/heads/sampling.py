"""The head of the last pipeline stage: logits, then one token for each row that samples, or several with drafts.

A sampled token goes straight into its row's token ids on the device, so the next step message may arrive before anyone
has read this one's output (I2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.logits_processors.base import SamplingStep
from app.engine.row_feature import RowFeature
from app.engine.sampling.sampler import Sampler
from app.engine.sampling.sampling_batch import HostParameters
from app.engine.spec_decode.drafting import Drafting
from app.engine.step import SchedulerOutput
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.graphs.decode_step import Decode
from app.engine.worker.heads.base import Head
from app.engine.worker.input_batch import InputBatch
from app.engine.worker.pending_step import StepResults
from app.engine.worker.row_state import RowState
from app.platforms import platform_of


class SamplingHead(Head):
    """The head of a generating model: the sampler."""

    def __init__(
        self,
        forward: ForwardPass,
        state: RowState,
        drafting: Drafting | None = None,
        slack: int = 0,
        plugins: Sequence[str] = (),
    ) -> None:
        """`slack`: by how much the host may overrate a row's length; `plugins`: logits processors beside ours."""
        super().__init__(state.device)
        self._forward = forward
        self._state = state
        self._drafting = drafting
        self._slack = slack
        self._pins = platform_of(state.device).is_async
        self._sampler = Sampler(len(state.num_tokens), forward.vocab_size, state.device, plugins)

    @property
    def features(self) -> Sequence[RowFeature]:
        """The features of this head: the logits processors and the sampler."""
        return self._sampler.features

    def finish(self, step: SchedulerOutput, batch: InputBatch, hidden: torch.Tensor) -> StepResults:
        """Sample from the logits of each row's last token, and of its drafts."""
        sampled = batch.sampled
        if len(sampled.rows) == 0:
            return self.empty(step.step_id)
        logits = self._forward.logits(hidden[batch.logits_indices])
        results = self._sample(step.step_id, logits, sampled.logits_rows, sampled.lengths, batch.device_lengths)
        if self._drafting is not None:
            self._drafting.finish(batch, results)
        else:
            self._keep(results.sampled_token_ids, batch.targets)
        return results

    def parameters(self, rows: NDArray[np.int64]) -> HostParameters | None:
        """None where a row wants more of the sampler than a draw."""
        return self._sampler.plain(rows)

    def finish_decode(
        self,
        step_id: int,
        decode: Decode,
        size: int,
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        parameters: HostParameters | None,
    ) -> StepResults:
        """Draw as the step itself does, or apart from it."""
        static, count = decode.step, len(rows)
        if parameters is None:
            tensors = static.tensors.first(count)
            results = self._sample(step_id, static.logits[:count].float(), rows, lengths, tensors.lengths)
            self._keep(results.sampled_token_ids, tensors.targets)
            return results
        decode.sample(size)
        self._forward.link.send_tokens(static.token_ids[:count])
        # Copied within the step: the next one writes to the same place.
        tokens = torch.empty(count, dtype=torch.int64, pin_memory=self._pins)
        return StepResults(step_id, tokens.copy_(static.token_ids[:count], non_blocking=True), is_host=True)

    def _sample(
        self,
        step_id: int,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        device_lengths: torch.Tensor,
    ) -> StepResults:
        """One token from each of the rows of fp32 logits [N, V], which are overwritten."""
        selected = self._sampler.select(rows)
        step = SamplingStep(selected.device_rows, lengths, device_lengths, self._state.token_ids, self._slack)
        sampled = self._sampler.sample(logits, selected, step)
        return StepResults(
            step_id, sampled.token_ids, sampled.logprobs, selected.logprob_indices, selected.logprob_counts
        )

    def _keep(self, token_ids: torch.Tensor, targets: torch.Tensor) -> None:
        """One new token [N] for each row, at its place; the first stage will want it."""
        self._state.flat_token_ids.index_copy_(0, targets, token_ids.int())
        self._forward.link.send_tokens(token_ids)
