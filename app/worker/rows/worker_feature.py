"""What a per-row feature of the worker is: penalties, grammars, prompt logprobs, KV transfers, drafts.

A feature remembers the rows whose requests ask for it, and costs a step without such rows as little as it can. The
runner calls each hook of its features in one order, that of the table (app/engine/worker/features), and calls only
those hooks that a feature overrides: a hook that nobody has costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from app.engine.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from app.engine.worker_info import WorkerInfo

if TYPE_CHECKING:  # what a step is made of, which itself knows of features
    from app.engine.worker.input_batch import InputBatch
    from app.engine.worker.pending_step import StepResults


class RowFeature:
    """Base of the features: every hook does nothing. Hooks are listed in the order in which they are called."""

    def connect(self, kv_caches: list[torch.Tensor]) -> None:
        """The KV cache has its final size: a tensor [B, ...] for each place of a block on this rank, which together are
        all of it."""

    def started(self, info: WorkerInfo) -> WorkerInfo:
        """The worker is ready; `info` with what this feature has to report of its start."""
        return info

    def weights_leave(self) -> None:
        """The memory of weights is about to be given back. Every rank is told, and no step is out."""

    def weights_change(self, whole: bool) -> None:
        """Weights are about to be replaced, under the names and in the places in which they were loaded; `whole`: all
        of them, and what there is now may be none. Every rank is told, and no step is out."""

    def before(self, step: SchedulerOutput) -> None:
        """A step message came. Its diffs are not applied yet, and its computation is not enqueued."""

    def leave(self, row: int) -> None:
        """The row was freed."""

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered the row, whose last one may have left without having been freed."""

    def inputs(self, batch: InputBatch) -> None:
        """Put tensors [T, ...] that layers read into `batch.layer_inputs`. An engine with such a feature has no decode
        steps over static tensors, which could not carry them."""

    def after(self, batch: InputBatch, hidden: torch.Tensor, results: StepResults) -> None:
        """Hidden states [T, C] of a step that is not over static tensors; adds to `results`."""

    def report(self, output: ModelRunnerOutput) -> None:
        """The newest output of a call is about to go back to the host."""

    def close(self) -> None:
        """Free what it holds; no step comes any more."""


class RowFeatures:
    """The features of one runner, each called for what it overrides."""

    def __init__(self, features: Sequence[RowFeature]) -> None:
        self._all = tuple(features)
        self._before, self._leave, self._enter = map(self._overriding, ("before", "leave", "enter"))
        self._inputs, self._after, self._report = map(self._overriding, ("inputs", "after", "report"))

    @property
    def gives_inputs(self) -> bool:
        """Whether a feature has inputs for layers."""
        return bool(self._inputs)

    def connect(self, kv_caches: list[torch.Tensor]) -> None:
        """The KV cache is allocated and has its final size."""
        for feature in self._all:
            feature.connect(kv_caches)

    def started(self, info: WorkerInfo) -> WorkerInfo:
        """What the features report of the start, added to `info`."""
        for feature in self._all:
            info = feature.started(info)
        return info

    def weights_leave(self) -> None:
        """Have every feature ready for weights without memory."""
        for feature in self._all:
            feature.weights_leave()

    def weights_change(self, whole: bool) -> None:
        """Have every feature ready for weights to be replaced."""
        for feature in self._all:
            feature.weights_change(whole)

    def before(self, step: SchedulerOutput) -> None:
        """Pass on a step message before it is applied."""
        for feature in self._before:
            feature.before(step)

    def apply(self, step: SchedulerOutput) -> None:
        """The rows that the message frees, then the requests that enter one: a row may be given away at once."""
        for row in step.freed_rows:
            for feature in self._leave:
                feature.leave(row)
        for request in step.new_requests:
            for feature in self._enter:
                feature.enter(request.row, request)

    def inputs(self, batch: InputBatch) -> None:
        """What the features bring to the layers."""
        for feature in self._inputs:
            feature.inputs(batch)

    def after(self, batch: InputBatch, hidden: torch.Tensor, results: StepResults) -> None:
        """Pass on the step's hidden states [T, C]."""
        for feature in self._after:
            feature.after(batch, hidden, results)

    def report(self, output: ModelRunnerOutput) -> None:
        """Let features add to the newest output before it goes back."""
        for feature in self._report:
            feature.report(output)

    def close(self) -> None:
        """Release what the features hold."""
        for feature in self._all:
            feature.close()

    def _overriding(self, hook: str) -> tuple[RowFeature, ...]:
        return tuple(feature for feature in self._all if getattr(type(feature), hook) is not getattr(RowFeature, hook))
