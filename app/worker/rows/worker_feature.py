"""The contract of a worker's feature: penalties, prompt logprobs, KV transfers, expert balance, drafts, token types.

A feature owns its slice of the worker, by hooks in four groups: the rows whose requests ask for it, the step (what its
layers are given, the hidden states before the head, the head's results), the weights, and the figures that it reports.
Features come from a table (worker/features), from the model, from the head and from a proposer of drafts. The runner
calls each hook in one order, and only those that a feature overrides: a hook that nobody has costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import nn

from app.layers.context import HiddenStates
from app.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from app.records.worker_info import WorkerInfo

if TYPE_CHECKING:  # what a step is made of, which itself knows of features
    import numpy as np

    from app.worker.rows.pending_step import StepResults
    from app.worker.rows.step_inputs import StepView


class WorkerFeature:
    """Base of the features: every hook does nothing. Hooks are listed in the order in which they are called."""

    # A part of the step that only some steps have: such a feature's `inputs`, `hidden` and `logits` run in the steps
    # for whose rows `takes_part` says so; captured steps exist with it and without. "": it is in every step.
    part: str = ""
    # Its own methods that the engine may call between steps, by `Worker.call_feature`.
    calls: tuple[str, ...] = ()
    # Models of its own, whose memory sleeps with that of the model's weights.
    models: tuple[nn.Module, ...] = ()
    # Layers of the model whose input, and at their number the output of the last, `hidden` is given.
    reads_layers: tuple[int, ...] = ()

    @property
    def later_bytes(self) -> int:
        """Memory of the device that it will take once the KV cache is there, and that is kept for it."""
        return 0

    def run_largest(self) -> None:
        """Do what takes the most memory of all that it does in steps, so that it is measured; on a GPU only."""

    def connect(self, kv_caches: list[torch.Tensor]) -> None:
        """The KV cache has its final size: a tensor [B, ...] for each place of a block on this rank, which together are
        all of it. Called again when the same tensors have got their memory back after a sleep, elsewhere and empty."""

    # ---- rows

    def leave(self, row: int) -> None:
        """The row was freed."""

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered the row, whose last one may have left without having been freed."""

    # ---- the step

    def before(self, step: SchedulerOutput) -> None:
        """A step message came. Its diffs are not applied yet, and its computation is not enqueued."""

    def takes_part(self, rows: NDArray[np.int64]) -> bool:
        """True if a step of these rows [R] has the feature's `part`."""
        return True

    def is_ordinary(self, rows: NDArray[np.int64]) -> bool:
        """True if a step of these rows [R] must not run over static tensors, though each gets one token."""
        return False

    def reads_all(self, rows: NDArray[np.int64]) -> bool:
        """True if, of a step of these rows [R], `hidden` reads the states of other tokens than each row's last: so it
        is of all that override `hidden` and do not say otherwise. Nobody else is asked."""
        return True

    def inputs(self, view: StepView) -> None:
        """Put tensors [T, ...] that layers read into `view.layer_inputs`, made on the device of what the view holds:
        the same lines run in ordinary steps and, once for all its replays, in the capture of a step."""

    def hidden(self, view: StepView, hidden: HiddenStates) -> None:
        """The step's hidden states, before the head reads them: in a step with prompts, where no feature `reads_all`,
        perhaps of rows' last tokens alone (`HiddenStates.of_ends`). Captured like `inputs`."""

    def stand_in(self, num_tokens: int) -> AbstractContextManager[None]:
        """Within it, layers find what a step of so many tokens with the feature's `part` would give them, though no
        request asked for it: its kernels are compiled then, and its memory measured."""
        return nullcontext()

    def logits(self, view: StepView, logits: torch.Tensor) -> None:
        """Change the fp32 logits [T, V] of a step over static tensors, before tokens are drawn from them. Captured."""

    def after(self, step: SchedulerOutput, results: StepResults) -> None:
        """The head has filled the step's `results`, to which the feature may add. Called after every step."""

    # ---- weights

    def weights_leave(self) -> None:
        """The memory of weights is about to be given back. Every rank is told, and no step is out."""

    def weights_change(self, whole: bool) -> None:
        """Weights are about to be replaced, under the names and in the places in which they were loaded; `whole`: all
        of them, and what there is now may be none. Every rank is told, and no step is out."""

    def weights_return(self) -> None:
        """Weights are there to be computed with again: back from a sleep, or replaced. Every rank is told, no step is
        out, and what is captured is captured after it."""

    def settle(self) -> None:
        """A call between steps begins, in which the device may be waited for: take in what other ranks are still
        sending, so that it comes to rest. Every rank is told, and no step is out."""

    # ---- figures

    def report_start(self, info: WorkerInfo) -> WorkerInfo:
        """Returns `info` with what this feature has to report of its start; the worker is ready."""
        return info

    def report(self, output: ModelRunnerOutput) -> None:
        """The newest output of a call is about to go back to the host."""

    def close(self) -> None:
        """Free what it holds; no step comes any more."""


class WorkerFeatures:
    """The features of one runner, each called for what it overrides."""

    def __init__(self, features: Sequence[WorkerFeature]) -> None:
        self._all = tuple(features)
        self._before, self._leave, self._enter = map(self._overriding, ("before", "leave", "enter"))
        self._ordinary = self._overriding("is_ordinary")
        self._inputs, self._hidden, self._logits = map(self._overriding, ("inputs", "hidden", "logits"))
        self._after, self._report = map(self._overriding, ("after", "report"))
        self.standing_in = self._overriding("stand_in")
        self._optional = tuple(feature for feature in self._all if feature.part)

    @property
    def parts(self) -> list[str]:
        """The optional parts of steps."""
        return sorted({feature.part for feature in self._optional})

    @property
    def forward_parts(self) -> frozenset[str]:
        """Those that change what is computed up to the logits."""
        return frozenset(feature.part for feature in (*self._inputs, *self._hidden) if feature.part)

    @property
    def logits_parts(self) -> frozenset[str]:
        """Those that change the logits."""
        return frozenset(feature.part for feature in self._logits if feature.part)

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """The layers whose inputs features want."""
        return tuple(sorted({layer for feature in self._all for layer in feature.reads_layers}))

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models of all features."""
        return tuple(model for feature in self._all for model in feature.models)

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """The result of a method of the one feature that has it among its `calls`."""
        (feature,) = (feature for feature in self._all if method in feature.calls)
        return getattr(feature, method)(*arguments)

    @property
    def later_bytes(self) -> int:
        """Memory that is kept for all features."""
        return sum(feature.later_bytes for feature in self._all)

    def run_largest(self) -> None:
        """Have every feature do what takes the most memory."""
        for feature in self._all:
            feature.run_largest()

    def connect(self, kv_caches: list[torch.Tensor]) -> None:
        """The KV cache is allocated and has its final size, or its memory again."""
        for feature in self._all:
            feature.connect(kv_caches)

    def report_start(self, info: WorkerInfo) -> WorkerInfo:
        """Returns what the features report of the start, added to `info`."""
        for feature in self._all:
            info = feature.report_start(info)
        return info

    def weights_leave(self) -> None:
        """Have every feature ready for weights without memory."""
        for feature in self._all:
            feature.weights_leave()

    def weights_change(self, whole: bool) -> None:
        """Have every feature ready for weights to be replaced."""
        for feature in self._all:
            feature.weights_change(whole)

    def weights_return(self) -> None:
        """Have every feature know that there are weights again."""
        for feature in self._all:
            feature.weights_return()

    def settle(self) -> None:
        """Have every feature done with what steps left under way."""
        for feature in self._all:
            feature.settle()

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

    def parts_of(self, rows: NDArray[np.int64]) -> frozenset[str]:
        """The optional parts that a step of these rows [R] has."""
        if not self._optional:
            return NO_PARTS
        return frozenset(feature.part for feature in self._optional if feature.takes_part(rows))

    def are_ordinary(self, rows: NDArray[np.int64]) -> bool:
        """True if a feature wants a step of these rows [R] not to be static."""
        return any(feature.is_ordinary(rows) for feature in self._ordinary)

    def read_all(self, rows: NDArray[np.int64]) -> bool:
        """True if a feature reads hidden states of all tokens of a step of these rows [R]."""
        return any(
            feature.reads_all(rows) and (not feature.part or feature.takes_part(rows)) for feature in self._hidden
        )

    def inputs(self, view: StepView, parts: frozenset[str]) -> None:
        """Adds what the features bring to the layers of a step with these parts."""
        for feature in self._inputs:
            if not feature.part or feature.part in parts:
                feature.inputs(view)

    def hidden(self, view: StepView, hidden: HiddenStates, parts: frozenset[str]) -> None:
        """Pass on the hidden states of a step with these parts."""
        for feature in self._hidden:
            if not feature.part or feature.part in parts:
                feature.hidden(view, hidden)

    def stand_in(self, num_tokens: int) -> ExitStack:
        """Within it, layers compute as in a step of so many tokens with all optional parts that change them."""
        with ExitStack() as stack:
            for feature in self.standing_in:
                stack.enter_context(feature.stand_in(num_tokens))
            return stack.pop_all()

    def logits(self, view: StepView, logits: torch.Tensor, parts: frozenset[str]) -> torch.Tensor:
        """Logits [T, V] of a step with these parts, as the features change them: in fp32 then, and a copy."""
        changing = [feature for feature in self._logits if not feature.part or feature.part in parts]
        if changing:
            logits = logits.to(torch.float32, copy=True)
        for feature in changing:
            feature.logits(view, logits)
        return logits

    def after(self, step: SchedulerOutput, results: StepResults) -> None:
        """Pass on the head's results."""
        for feature in self._after:
            feature.after(step, results)

    def report(self, output: ModelRunnerOutput) -> None:
        """Let features add to the newest output before it goes back."""
        for feature in self._report:
            feature.report(output)

    def close(self) -> None:
        """Release what the features hold."""
        for feature in self._all:
            feature.close()

    def _overriding(self, hook: str) -> tuple[WorkerFeature, ...]:
        base = getattr(WorkerFeature, hook)
        return tuple(feature for feature in self._all if getattr(type(feature), hook) is not base)


NO_PARTS: frozenset[str] = frozenset()
