"""Runs a warm-up plan, part by part, as the start of a worker comes to them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from app.config import EngineConfig
from app.engine.pooling.params import PoolingParams
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.graphs.decode_step import DecodeStep
from app.engine.worker.model_runner import ModelRunner
from app.engine.worker.warmup.dummy_step import draw, dummy_forward, launch_static, run_requests
from app.engine.worker.warmup.plan import DummyStep, WarmupPlan
from app.platforms import platform_of

logger = logging.getLogger("manta.worker")


@dataclass(slots=True, frozen=True)
class WarmUp:
    """One start's plan and what it is run on."""

    config: EngineConfig
    plan: WarmupPlan
    forward: ForwardPass
    device: torch.device
    shares_prefixes: bool = False
    pooling: PoolingParams | None = None  # what the plan's prompts ask for; None: they generate

    def compile(self, static: DecodeStep | None) -> None:
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
            return
        from app.kernels.compile_ahead import compile_ahead  # Triton, which a CPU does without

        began = time.monotonic()
        try:
            with compile_ahead(self.device) as ahead:
                self.launch(static)
            logger.info("kernels: %d loaded, %d failed, %.1f s", ahead.compiled, ahead.failed, time.monotonic() - began)
            platform.runtime.synchronize(self.device)
        except Exception as error:
            if self.config.world_size > 1:
                raise
            logger.warning("kernels are compiled when they are met: compiling them ahead failed", exc_info=error)

    def launch(self, static: DecodeStep | None) -> None:
        """Launch the plan's steps and sampling."""
        if static is not None:
            launch_static(static)
        for step in self.plan.compile:
            hidden = self._forward(step)
            if self.forward.link.is_last:
                draw(self.forward.logits(hidden[: len(step.counts)].contiguous()))

    def largest(self, runner: ModelRunner) -> None:
        """Run a step of as many tokens, logits and sampling buffers, or results, as any can have."""
        if self.plan.largest is None:
            self._run_prompts(runner, self.plan.prompts)
            return
        hidden = self._forward(self.plan.largest)
        if self.forward.link.is_last:
            logits = self.forward.logits(hidden[: len(self.plan.largest.counts)].contiguous())
            logits.softmax(dim=-1).sort(dim=-1)  # what top_p needs

    def run(self, runner: ModelRunner, num_blocks: int) -> None:
        """The steps that are really computed, with the KV cache and the graphs that requests will have."""
        for step in self.plan.run:
            hidden = self._forward(step)
            if self.forward.link.is_last:
                self.forward.logits(hidden[-1:]).argmax(dim=-1)
        room = num_blocks // self._num_groups
        self._run_prompts(runner, fitting(self.plan.prompts, room, self.config.block_size))
        if (runtime := platform_of(self.device).runtime) is not None:
            runtime.synchronize(self.device)

    def _forward(self, step: DummyStep) -> torch.Tensor:
        return dummy_forward(self.forward, step, self.device, shares_prefixes=self.shares_prefixes)

    def _run_prompts(self, runner: ModelRunner, prompts: tuple[int, ...]) -> None:
        run_requests(runner, prompts, self.config.block_size, self._num_groups, self.pooling)

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
