"""Runs a warm-up plan, part by part, as the start of a worker comes to them."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from app.config.engine import EngineConfig
from app.errors import CheckpointError
from app.kernels import compile_processes
from app.platforms import platform_of
from app.records.pooling_params import PoolingParams
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.prompt_step import PromptStep
from app.worker.graphs.static_step import StaticStep
from app.worker.model_runner import ModelRunner
from app.worker.rows.worker_feature import WorkerFeatures
from app.worker.warmup.dummy_step import draw, dummy_forward, launch_prompts, launch_static, run_requests
from app.worker.warmup.plan import DummyStep, WarmupPlan

logger = logging.getLogger("manta.worker")


@dataclass(slots=True, frozen=True)
class WarmUp:
    """One start's plan and what it is run on."""

    config: EngineConfig
    plan: WarmupPlan
    forward: ForwardPass
    device: torch.device
    features: WorkerFeatures
    shares_prefixes: bool = False
    pooling: PoolingParams | None = None  # what the plan's prompts ask for; None: they generate
    num_drafts: int = 0  # that a row may have

    def compile(self, static: StaticStep | None, prompts: PromptStep | None = None) -> None:
        """Load every kernel that the start and ordinary steps will launch; on a GPU only. Needs the plan's
        `measured_blocks` of KV cache.

        Inside `compile_ahead` kernels do not run, and what torch computes from their uninitialised results is thrown
        away. So no value that a kernel would have written may serve as an index, unless it lies in memory that was
        zeroed before (StepTensors.zeros): steps read token 0 throughout, and draws go to the first token of row 0,
        which every request that enters the row overwrites.

        Collective over all ranks: of several, one that fails raises, as the others wait for it. A single one goes on:
        what failed here will fail again where it is met and handled.
        """
        platform = platform_of(self.device)
        if platform.kernels != "triton" or not self.plan.compile:
            compile_processes.end()
            return
        from app.kernels.compile_ahead import compile_ahead  # Triton, which a CPU does without

        began = time.monotonic()
        try:
            with compile_ahead(self.device, self.config.world_size) as ahead:
                self.launch(static, prompts)
            logger.info("kernels: %d loaded, %d failed, %.1f s", ahead.compiled, ahead.failed, time.monotonic() - began)
            platform.runtime.synchronize(self.device)
        except Exception as error:
            if self.config.world_size > 1:
                raise
            logger.warning("kernels are compiled when they are met: compiling them ahead failed", exc_info=error)

    def launch(self, static: StaticStep | None, prompts: PromptStep | None = None) -> None:
        """Launch the plan's steps and sampling: first the longest prompt, whose kernels take the longest to compile."""
        first = max(self.plan.compile, key=lambda step: max(step.counts))
        self._launch_step(first)
        if static is not None:
            launch_static(static)
        if prompts is not None:
            launch_prompts(prompts)
        for step in self.plan.compile:
            if step is not first:
                self._launch_step(step)

    def _launch_step(self, step: DummyStep) -> None:
        if self.features.standing_in:
            self._logits(step, with_parts=True)
        logits = self._logits(step)
        if logits is not None:
            draw(logits)

    def largest(self, runner: ModelRunner) -> None:
        """Run a step of as many tokens, logits and sampling buffers, or results, as any can have."""
        if self.plan.largest is None:
            self._run_prompts(runner, self.plan.prompts)
            return
        logits = self._logits(self.plan.largest, with_parts=True)
        if logits is not None:
            logits.softmax(dim=-1).sort(dim=-1)  # what top_p needs

    def run(self, runner: ModelRunner, num_blocks: int) -> None:
        """The steps that are really computed, with the KV cache and the graphs that requests will have. CheckpointError
        where the model computes no numbers."""
        room = num_blocks // self._num_groups
        self._run_prompts(runner, fitting(self.plan.prompts, room, self.config.block_size))
        largest = [torch.zeros(1, device=self.device)]
        for step in self.plan.run:  # over the keys and values that the prompts left
            hidden = self._forward(step)
            if self.forward.link.is_last:
                largest.append(self.forward.logits(hidden[-1:]).amax(dim=-1))
        self._refuse_nan(bool(torch.cat(largest).isfinite().all()))
        if (runtime := platform_of(self.device).runtime) is not None:
            runtime.synchronize(self.device)

    def _forward(self, step: DummyStep) -> torch.Tensor:
        return dummy_forward(self.forward, step, self.device, shares_prefixes=self.shares_prefixes)

    def _logits(self, step: DummyStep, *, with_parts: bool = False) -> torch.Tensor | None:
        """Logits of as many tokens as the step has rows; None in an earlier stage."""
        with self.features.stand_in(sum(step.counts)) if with_parts else nullcontext():
            hidden, chosen = self._forward(step), slice(len(step.counts))
            return self.forward.logits(hidden[chosen].contiguous(), chosen) if self.forward.link.is_last else None

    def _run_prompts(self, runner: ModelRunner, prompts: tuple[int, ...]) -> None:
        size = self.config.block_size
        outputs = run_requests(runner, prompts, size, self._num_groups, self.pooling, self.num_drafts)
        results = [one for output in outputs for one in output.pooled or () if one is not None]
        self._refuse_nan(all(np.isfinite(one).all() for one in results))

    def _refuse_nan(self, is_finite: bool) -> None:
        """Random weights may be any bits; whoever asks for them wants no answers."""
        if is_finite or self.config.load_format == "dummy":
            return
        kind = str(self.forward.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"the model computes NaN or infinity in {kind}: its weights or the numbers in its config.json are damaged"
            + (", or too large for this type: set --dtype bfloat16 or float32" if kind == "float16" else ""),
            param="model",
        )

    @property
    def _num_groups(self) -> int:
        return len(self.forward.cache.spec.windows)


def fitting(prompts: tuple[int, ...], num_blocks: int, block_size: int) -> tuple[int, ...]:
    """The prompts that fit into so many blocks, the last one cut to fit."""
    kept: list[int] = []
    for length in prompts:
        room = num_blocks - sum(-(-other // block_size) for other in kept)
        if room < 1:
            break
        kept.append(min(length, room * block_size))
    return tuple(kept)
