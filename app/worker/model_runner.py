"""One step on the device: diffs, inputs, forward pass, head. For generating and for pooling models.

What differs is in the parts that it is made of, and none of them is exchanged later: the forward pass (the model and
its cache), the head (what ends a step), the features that follow rows, and how steps that only decode run.
"""

from __future__ import annotations

import numpy as np

from app.engine.row_feature import RowFeatures
from app.engine.step import ModelRunnerOutput, SchedulerOutput
from app.engine.worker.cascade_choice import CascadeChoice
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.graphs.decode_step import Decode
from app.engine.worker.heads.base import Head
from app.engine.worker.input_batch import build_input_batch, check_rows
from app.engine.worker.pending_step import CopyStream, PendingStep, StepClock, StepResults
from app.engine.worker.row_state import RowState
from app.platforms import platform_of


class ModelRunner:
    """Executes steps one after another. Callers hold torch.inference_mode()."""

    def __init__(
        self,
        forward: ForwardPass,
        state: RowState,
        head: Head,
        features: RowFeatures,
        cascade: CascadeChoice | None = None,  # None: no step reads shared prefixes once
        decode: Decode | None = None,  # how steps that only decode run; None: as all others
    ) -> None:
        self._forward = forward
        self._state = state
        self._head = head
        self._features = features
        self._cascade = cascade
        self._decode = decode
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
        decode = self._decode
        if decode is not None and _is_decode(step) and decode.size_for(len(step.rows)) is not None:
            results = self._static(step, decode)
        else:
            results = self._dynamic(step)
        self._state.advance(step)
        return PendingStep(results, clock, self._copy)

    def report(self, output: ModelRunnerOutput) -> None:
        """The newest output of a call is about to go back to the host: features add to it."""
        self._features.report(output)

    def release_graphs(self) -> None:
        """Free the graphs, whose addresses no longer hold; steps that only decode then run as all others."""
        if self._decode is not None:
            self._decode.release()
            self._decode = None

    def close(self) -> None:
        """Free what features hold outside of the device's memory."""
        self._features.close()

    def _dynamic(self, step: SchedulerOutput) -> StepResults:
        """A step of any mix of prefills and decodes."""
        batch = build_input_batch(step, self._state)
        if self._cascade is not None:
            decodes = step.rows[: batch.attention.num_decodes].astype(np.int64)
            batch.attention.cascade = self._cascade.wanted(decodes)
        self._features.inputs(batch)
        hidden = self._forward.run(batch.input_ids, batch.positions, batch.attention, batch.layer_inputs)
        results = self._head.finish(step, batch, hidden)
        self._features.after(batch, hidden, results)
        return results

    def _static(self, step: SchedulerOutput, decode: Decode) -> StepResults:
        """A step in which each row brings one token and samples: over static tensors, on a GPU from graphs."""
        head, static, count = self._head, decode.step, len(step.rows)
        rows = step.rows.astype(np.int64)
        lengths = self._state.num_computed_tokens[rows] + 1
        check_rows(self._state, step, lengths)
        parameters = head.parameters(rows)
        shares = self._cascade is not None and self._cascade.wanted(rows)
        cascade_size = decode.size_for(count, cascade=True) if shares else None
        size = cascade_size or decode.size_for(count)
        assert size is not None, "the caller asked"
        static.load(rows, parameters)
        received = self._forward.link.receive_hidden(count)
        if static.received is not None and received is not None:
            static.received[:count].copy_(received)
        decode.forward(size, cascade=cascade_size is not None)
        return head.finish_decode(step.step_id, decode, size, rows, lengths, parameters)


def _is_decode(step: SchedulerOutput) -> bool:
    return bool(step.samples.all()) and int(step.num_scheduled_tokens.max()) == 1
