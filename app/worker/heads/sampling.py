"""The head of the last pipeline stage: logits, then one token for each row that samples, or several with drafts.

A sampled token goes straight into its row's token ids on the device, so the next step message may arrive before anyone
has read this one's output (I2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from app.layers.context import ForwardContext, HiddenStates
from app.platforms.to_device import to_device
from app.records.step import SchedulerOutput
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.static_step import Static, StaticStep, StepKey
from app.worker.heads.base import Head
from app.worker.logits_processors.base import SamplingStep
from app.worker.rows.input_batch import InputBatch, SampledRows
from app.worker.rows.pending_step import StepResults
from app.worker.rows.row_state import RowState
from app.worker.rows.worker_feature import WorkerFeature
from app.worker.sampling.sampler import Sampler
from app.worker.spec_decode.base import Proposal
from app.worker.spec_decode.drafting import Drafting
from app.worker.spec_decode.verify import places_of


class SamplingHead(Head):
    """The head of a generating model: the sampler."""

    def __init__(
        self,
        forward: ForwardPass,
        state: RowState,
        drafting: Drafting | None = None,
        slack: int = 0,
        plugins: Sequence[str] = (),
        *,
        exact: bool = False,
    ) -> None:
        """`slack`: by how much the host may overrate a row's length; `plugins`, `exact`: see `Sampler`."""
        super().__init__(state.device)
        self._forward = forward
        self._state = state
        self._drafting = drafting
        self.reads_context = drafting is not None
        self._slack = slack
        self._sampler = Sampler(
            state.inputs, len(state.num_tokens), forward.vocab_size, state.device, plugins, exact=exact
        )

    @property
    def features(self) -> Sequence[WorkerFeature]:
        """The features of this head: the logits processors and the sampler."""
        return self._sampler.features

    def finish(
        self, step: SchedulerOutput, batch: InputBatch, hidden: HiddenStates, ctx: ForwardContext | None
    ) -> StepResults:
        """Sample from the logits of each row's last token, and of its drafts."""
        sampled, rows = batch.sampled, batch.view.tensors.rows
        if len(sampled.rows) == 0:
            results, kept = self.empty(step.step_id), (batch.targets, batch.targets)  # both empty
        else:
            chosen = hidden.last.index_select(0, batch.sampling if hidden.of_ends else batch.logits_indices)
            logits = self._forward.logits(chosen, batch.logits_indices)
            results = self._sample(step.step_id, logits, sampled, batch.device_lengths)
            if self._drafting is not None and len(sampled.rows) < len(rows):
                rows = to_device(sampled.rows.astype(np.int32), self.device)
            kept = self._keep(results, sampled, rows, batch.targets)
            self._settle_states(sampled, ctx, kept[0])
        if self._drafting is not None and (len(sampled.rows) or self._drafting.proposer.attention_layers):
            assert ctx is not None
            num_new, last = kept
            rows = rows[: len(num_new)]
            proposal = Proposal(
                rows.long(),
                num_new,
                batch.logits_indices[last],
                self._state.columns,
                batch.view,
                hidden,
                ctx,
                self._forward.context,
                step.num_proposed,
            )
            self._drafting.propose(rows, proposal)
            self._drafting.tell(rows, num_new)
        return results

    def _settle_states(self, sampled: SampledRows, ctx: ForwardContext | None, num_new: torch.Tensor) -> None:
        """The rows got so many tokens int64 [N]."""
        states = None if self._drafting is None else self._drafting.states
        if states is None or sampled.num_drafts is None:
            return
        drafted = np.flatnonzero(sampled.num_drafts)
        if len(drafted):
            assert ctx is not None
            states.accept(ctx, num_new[to_device(drafted, self.device)])

    def finish_static(
        self,
        step: SchedulerOutput,
        static: Static,
        key: StepKey,
        rows: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
    ) -> StepResults:
        """Draw as the step itself does, or apart from it."""
        inner = static.step
        if not self._sampler.is_plain(rows):
            return self._finish_apart(step, inner, key, seq_lens)
        static.sample(key)
        each = inner.places_each(key)
        tokens = inner.token_ids[: len(rows) * each]
        results = StepResults(step.step_id, tokens, is_static=True)
        if self._drafting is None:
            self._forward.link.send_tokens(tokens)
            return results
        num_new = inner.num_new[: len(rows)]
        if each > 1:
            results.num_sampled, results.num_logits = num_new, np.full(len(rows), each)
        is_proposed = self._drafting.proposer.is_capturable and key.drafts >= step.num_proposed
        self._go_on(step, inner, key, num_new, is_proposed=is_proposed)
        return results

    def _finish_apart(
        self, step: SchedulerOutput, inner: StaticStep, key: StepKey, seq_lens: NDArray[np.int64]
    ) -> StepResults:
        """The tokens of a static step from its logits, by what the rows want beyond a draw."""
        each, tensors = inner.places_each(key), inner.tensors
        firsts = np.arange(len(step.rows)) * each
        sampled = SampledRows.of(step, firsts + step.num_scheduled_tokens, seq_lens)
        at: slice | torch.Tensor = slice(len(step.rows))
        if each > 1:
            at = to_device(sampled.indices, self.device)
        results = self._sample(step.step_id, inner.logits[at].float(), sampled, tensors.lengths[at])
        rows = tensors.rows[: len(step.rows)]
        num_new, _ = self._keep(results, sampled, rows, tensors.targets[at])
        if self._drafting is not None:
            inner.settle_states(key, num_new)
            self._go_on(step, inner, key, num_new, is_proposed=False)
        return results

    def _go_on(
        self, step: SchedulerOutput, inner: StaticStep, key: StepKey, num_new: torch.Tensor, *, is_proposed: bool
    ) -> None:
        """Drafts after a static step, unless they were captured with it."""
        assert self._drafting is not None
        if not is_proposed:
            inner.propose(key, num_new, step.num_proposed)
        self._drafting.tell(inner.tensors.rows[: len(step.rows)], num_new)

    def _sample(
        self, step_id: int, logits: torch.Tensor, sampled: SampledRows, device_lengths: torch.Tensor
    ) -> StepResults:
        """One token from each of the rows of fp32 logits [L, V], which are overwritten."""
        selected = self._sampler.select(sampled.logits_rows)
        step = SamplingStep(selected.device_rows, sampled.lengths, device_lengths, self._state.token_ids, self._slack)
        drawn = self._sampler.sample(logits, selected, step)
        return StepResults(step_id, drawn.token_ids, drawn.logprobs, selected.logprob_indices, selected.logprob_counts)

    def _keep(
        self, results: StepResults, sampled: SampledRows, rows: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the tokens [L] into their rows int32 [N], at `targets` [L]. Where drafts are verified: int64 [N] how
        many tokens each row gets, and where the last of these stands."""
        tokens = results.sampled_token_ids
        if self._drafting is None:
            self._state.flat_token_ids.index_copy_(0, targets, tokens.int())
            self._forward.link.send_tokens(tokens)
            return targets, targets
        drafts = sampled.num_drafts
        places = None if drafts is None else places_of(drafts, self.device)
        num_new, last = self._drafting.keep(rows, places, targets, tokens)
        if drafts is not None:
            results.num_sampled, results.num_logits = num_new, drafts + 1
        return num_new, last
