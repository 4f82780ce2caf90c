"""One step on the device: diffs, inputs, forward pass, head. For generating and for pooling models.

What differs is in the parts that it is made of, and none of them is exchanged later: the forward pass (the model and
its cache), the head (what ends a step), the features that follow rows, and how steps that only decode run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from app.platforms import platform_of
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.worker.cascade_choice import CascadeChoice
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.prompt_graphs import PromptReplays
from app.worker.graphs.static_step import CASCADE, LONG, MOST_EMPTY, Static, StepKey
from app.worker.heads.base import Head
from app.worker.rows.input_batch import build_input_batch, check_rows
from app.worker.rows.pending_step import CopyStream, PendingStep, StepClock, StepResults
from app.worker.rows.row_state import RowState
from app.worker.rows.worker_feature import WorkerFeatures


class ModelRunner:
    """Executes steps one after another. Callers hold torch.inference_mode()."""

    def __init__(
        self,
        forward: ForwardPass,
        state: RowState,
        head: Head,
        features: WorkerFeatures,
        cascade: CascadeChoice | None = None,  # None: no step reads shared prefixes once
        static: Static | None = None,  # how steps that only decode run; None: as all others
        prompts: PromptReplays | None = None,  # of layers of the others; None: none are replayed
    ) -> None:
        self._forward = forward
        self._state = state
        self._head = head
        self._features = features
        self._cascade = cascade
        self._static = static
        self._prompts = prompts
        self._runtime = platform_of(state.device).runtime
        self._copy = CopyStream.of(state.device)

    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Compute (on a GPU: enqueue) the step."""
        self._features.before(step)
        clock = StepClock(self._runtime)
        self._features.apply(step)
        self._state.apply(step)
        if len(step.rows) == 0:
            return PendingStep(self._head.empty(step.step_id), clock, self._copy)
        rows = step.rows.astype(np.int64)
        key = None if self._static is None else self._key_for(step, rows, self._static)
        if self._static is not None and key is not None:
            results = self._run_static(step, rows, self._static, key)
        else:
            results = self._run(step, clock)
        self._features.after(step, results)
        self._state.advance(step)
        return PendingStep(results, clock, self._copy)

    def report(self, output: ModelRunnerOutput) -> None:
        """The newest output of a call is about to go back to the host: features add to it."""
        self._features.report(output)
        if self._prompts is not None:
            self._prompts.report(output)

    def release_graphs(self) -> None:
        """Free the graphs, whose addresses no longer hold; steps that only decode then run as all others."""
        self._forward.release()
        if self._static is not None:
            self._static.release()
            self._static = None
        if self._prompts is not None:
            self._prompts.release()
            self._prompts = None

    def close(self) -> None:
        """Free what features hold outside of the device's memory."""
        self._features.close()

    def _run(self, step: SchedulerOutput, clock: StepClock) -> StepResults:
        """A step of any mix of prefills and decodes."""
        batch = build_input_batch(step, self._state)
        if self._cascade is not None:
            decodes = step.rows[: batch.attention.num_decodes].astype(np.int64)
            batch.attention.cascade = self._cascade.wanted(decodes)
        parts = self._features.parts_of(batch.host.rows)
        self._features.inputs(batch.view, parts)
        is_plain = not parts & self._features.forward_parts
        reads_ends = is_plain and self._forward.reads_ends
        if reads_ends and self._features.read_all(batch.host.rows):
            is_plain = reads_ends = False
        hidden = None if self._prompts is None or not is_plain else self._prompts.hidden(batch, clock)
        ctx = None
        if hidden is None:
            received = self._forward.receive(len(batch.positions))
            ends, brought = batch.ends if reads_ends else None, batch.view.layer_inputs
            ctx = self._forward.context(batch.positions, batch.attention, received, brought, ends)
            hidden = self._forward.run(batch.input_ids, ctx)
        elif self._head.reads_context:
            ctx = self._forward.context(batch.positions, batch.attention, None, batch.view.layer_inputs)
            hidden = hidden.map(torch.clone)  # the next replay writes where they are
        self._features.hidden(batch.view, hidden, parts)
        return self._head.finish(step, batch, hidden, ctx)

    def _key_for(self, step: SchedulerOutput, rows: NDArray[np.int64], static: Static) -> StepKey | None:
        """The static step that serves this one; None: none does, as a row has a prompt's tokens, or for its size."""
        counts, drafts = step.num_scheduled_tokens, step.num_draft_tokens
        if not step.samples.all() or int((counts if drafts is None else counts - drafts).max()) != 1:
            return None
        if self._features.are_ordinary(rows):
            return None
        parts = self._features.parts_of(rows)
        most = 0 if drafts is None else int(drafts.max())
        # Behind one with fewer drafts than are wanted the others are proposed apart.
        for count in dict.fromkeys(number for number in (max(most, step.num_proposed), most) if number):
            key = static.key_for(len(rows), parts, count)
            if key is not None and key.size * static.step.places_each(key) - step.num_tokens <= MOST_EMPTY:
                return key
        if most:
            return None
        ways = {
            CASCADE: self._cascade is not None and self._cascade.wanted(rows),  # first: it computes layer by layer, too
            LONG: static.step.is_long(rows),
        }
        for way in (way for way, is_wanted in ways.items() if is_wanted):
            if (found := static.key_for(len(rows), parts | {way})) is not None:
                return found
        return static.key_for(len(rows), parts)

    def _run_static(self, step: SchedulerOutput, rows: NDArray[np.int64], static: Static, key: StepKey) -> StepResults:
        """A step in which each row samples behind its newest token and its drafts: on a GPU from graphs."""
        inner = static.step
        counts = step.num_scheduled_tokens if inner.places_each(key) > 1 else None  # None: one each
        seq_lens = self._state.num_computed_tokens[rows] + (1 if counts is None else counts)
        check_rows(self._state, step, seq_lens)
        inner.inputs.load(rows, counts)
        if inner.received is not None:
            received = self._forward.receive(step.num_tokens)
            assert received is not None
            inner.received[inner.filled(key, step.num_scheduled_tokens)] = received
        static.forward(key)
        return self._head.finish_static(step, static, key, rows, seq_lens)
