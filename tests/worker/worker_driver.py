"""Drives a Worker with hand-written step messages, as a scheduler would that has room for everything.

Requests enter at once; each step gives every unfinished one its next `chunk` tokens, decodes first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from app.config.engine import EngineConfig
from app.layers.context import ForwardContext, HiddenStates
from app.records.bad_words import BadWords
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenLogprobs
from app.worker.graphs.prompt_graphs import PromptReplays
from app.worker.graphs.prompt_step import PromptKey, PromptStep
from app.worker.graphs.static_step import StaticStep
from app.worker.worker import Worker


@dataclass
class Run:
    """One request and what came of it."""

    prompt: list[int]
    params: SamplingParams
    choice_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    asks: tuple[object, ...] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    row: int = -1
    computed: int = 0  # as scheduled
    known: int = 0  # as scheduled: prompt + tokens asked for
    blocks: int = 0


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "seed": 0, **more})


def decode_statically(
    worker: Worker | None, sizes: list[int], cascade_sizes: tuple[int, ...] = (), kind: type[StaticStep] = StaticStep
) -> StaticStep:
    """Make a started worker decode over static tensors, as a GPU's does, without the capture."""
    assert worker is not None
    assert worker._runner is not None
    runner = worker._runner
    drafting = getattr(runner._head, "_drafting", None)
    counts = () if drafting is None else worker._config.speculative_config.counts(drafting.num_draft_tokens)
    with torch.inference_mode():
        step = kind(runner._forward, runner._state, runner._features, sizes, cascade_sizes, counts, drafting=drafting)
    runner._static = step
    return step


def replay_prompts(worker: Worker | None, most_tokens: int = 192) -> list[PromptKey]:
    """Make a started worker compute steps with prompts as a GPU's would, without the capture; what ran."""
    assert worker is not None
    runner, ran = worker._runner, list[PromptKey]()
    assert runner is not None
    step = PromptStep(runner._forward, runner._state, most_tokens)

    def run(key: PromptKey) -> None:
        ran.append(key)
        step.run(key)

    runner._prompts = PromptReplays(step)
    runner._prompts.replays |= {key: partial(run, key) for key in step.keys}
    with torch.inference_mode():
        step.pad_all(step.keys[0])
        step.run(step.keys[0])  # as before a capture
    return ran


def all_logits(driver: Driver, prompt: list[int], *asks: object) -> torch.Tensor:
    """Logits [T, V] of every token of a prompt, through the worker's own steps; what these read of them alone is the
    same."""
    found: list[torch.Tensor] = []
    assert driver.worker._runner is not None
    forward = driver.worker._runner._forward
    run = forward.run

    def spy(input_ids: torch.Tensor, ctx: ForwardContext) -> HiddenStates:
        whole = run(input_ids, replace(ctx, read=None))
        found.append(forward.logits(whole.last))
        if ctx.read is None:
            return whole
        read = HiddenStates(whole.last[ctx.read], whole.inputs_of, of_ends=True)
        if not any(ctx.states):  # which would go through the tokens twice
            torch.testing.assert_close(run(input_ids, ctx).last, read.last)
        return read

    forward.run = spy  # type: ignore[method-assign]
    driver.run([Run(prompt, greedy(1), asks=asks)])
    return torch.cat(found)


class Driver:
    """A worker on the CPU and the bookkeeping of a trivial scheduler."""

    def __init__(self, model: str, *, chunk: int = 10_000, **options: Any) -> None:
        defaults: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 32, "block_size": 16}
        self.config = EngineConfig(model=model, **{**defaults, **options})
        self.chunk = chunk
        self.worker = Worker(self.config)
        self.info = self.worker.start()
        self.free_blocks = list(range(self.info.num_blocks))
        # Blocks in a scrambled order, so that nothing works by accident of being consecutive.
        np.random.default_rng(0).shuffle(self.free_blocks)
        self.free_rows = list(range(self.config.max_num_seqs))
        self.step_id = 0
        self.steps: list[SchedulerOutput] = []

    def run(self, runs: list[Run]) -> list[Run]:
        """Run all to the end, then free their rows."""
        waiting, live, owned = list(runs), [], {}
        freed: list[int] = []
        while waiting or live:
            new = [self._enter(run, owned) for run in waiting]
            live, waiting = live + waiting, []
            step_message, scheduled = self._step_message(live, new, owned, freed)
            freed = []
            self._take(self.worker.execute(step_message), step_message, scheduled)
            for run in [run for run in live if run.known - len(run.prompt) >= (run.params.max_tokens or 0)]:
                live.remove(run)
                freed.append(run.row)
                self.free_rows.append(run.row)
                self.free_blocks += owned.pop(run.row)
        self.worker.execute(self._empty(freed))
        return runs

    def _enter(self, run: Run, owned: dict[int, list[int]]) -> NewRequest:
        run.row = self.free_rows.pop(0)
        run.known, run.computed = len(run.prompt), 0
        owned[run.row] = []
        asks = (BadWords(run.bad_words_token_ids), *run.asks)
        return NewRequest(
            row=run.row,
            token_ids=np.array(run.prompt, dtype=np.int32),
            num_prompt_tokens=len(run.prompt),
            num_computed_tokens=0,
            block_ids=[],
            spec=EngineRequest("r", [], run.params, run.choice_index, asks=asks),
            eos_token_ids=run.eos_token_ids,
        )

    def _step_message(
        self, live: list[Run], new: list[NewRequest], owned: dict[int, list[int]], freed: list[int]
    ) -> tuple[SchedulerOutput, list[Run]]:
        scheduled = sorted(live, key=lambda run: min(run.known - run.computed, self.chunk) != 1)
        counts = [min(run.known - run.computed, self.chunk) for run in scheduled]
        new_blocks = []
        for run, count in zip(scheduled, counts, strict=True):
            long = -(-(run.computed + count) // self.config.block_size)
            need = long * len(self.info.kv_windows) - len(owned[run.row])
            if need > 0:
                blocks = [self.free_blocks.pop() for _ in range(need)]
                owned[run.row] += blocks
                new_blocks.append((run.row, blocks))
        samples = [run.computed + count == run.known for run, count in zip(scheduled, counts, strict=True)]
        for run, count, samples_now in zip(scheduled, counts, samples, strict=True):
            run.computed += count
            run.known += samples_now
        step_message = self._empty(freed)
        step_message.rows = np.array([run.row for run in scheduled], dtype=np.int32)
        step_message.num_scheduled_tokens = np.array(counts, dtype=np.int32)
        step_message.samples = np.array(samples, dtype=np.bool_)
        step_message.num_proposed = self.info.num_draft_tokens
        step_message.new_requests, step_message.new_blocks = new, new_blocks
        return step_message, scheduled

    def _empty(self, freed: list[int]) -> SchedulerOutput:
        self.step_id += 1
        none = np.zeros(0, dtype=np.int32)
        # Where steps may overlap, on a GPU, each ends before the next one here.
        return SchedulerOutput(self.step_id, none, none, none.astype(np.bool_), freed_rows=freed, flush=True)

    def _take(self, outputs: list[ModelRunnerOutput], step_message: SchedulerOutput, scheduled: list[Run]) -> None:
        assert [output.step_id for output in outputs] == [step_message.step_id]
        sampled = [run for run, samples in zip(scheduled, step_message.samples, strict=True) if samples]
        output = outputs[0]
        for j, run in enumerate(sampled):
            run.tokens.append(int(output.sampled_token_ids[j]))
            run.logprobs.append(output.logprobs[j] if output.logprobs else None)
        for index, (position, entries) in (output.prompt_logprobs or {}).items():
            run = scheduled[index]
            assert position == len(run.prompt_logprobs) + 1
            run.prompt_logprobs += entries
