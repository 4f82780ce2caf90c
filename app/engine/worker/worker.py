"""One rank of an engine, wherever it runs: in this process, or inside an actor.

Step messages are executed one after another. On a device that computes in the background, a call enqueues its step and
returns the outputs of the steps before; a `flush` message returns everything (I2). On a CPU a call returns its own.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque

import torch

from app.config import EngineConfig
from app.engine.distributed.process_groups import leave_groups
from app.engine.step import ModelRunnerOutput, SchedulerOutput
from app.engine.worker import kv_sizing
from app.engine.worker.build import build
from app.engine.worker.device import enter_thread, num_threads
from app.engine.worker.memory_snapshot import dump_memory
from app.engine.worker.model_runner import ModelRunner
from app.engine.worker.pending_step import PendingStep
from app.engine.worker.placement import place
from app.engine.worker.profile import Profile
from app.engine.worker_info import RendezvousInfo, WorkerInfo
from app.errors import InvalidRequestError

logger = logging.getLogger("manta.worker")


class Worker:
    """`start` once, then `execute` step message after step message (any one thread at a time), then `shutdown`."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        rendezvous: RendezvousInfo | None = None,
    ) -> None:
        """`local_rank` is the number of this worker's device among those that the process sees."""
        assert world_size == config.world_size
        assert world_size == 1 or rendezvous is not None, "several ranks need a rendezvous"
        self._config = config
        self._rank = rank
        self._local_rank = local_rank
        self._rendezvous = rendezvous
        self._device = torch.device("cpu")
        self._threads = num_threads(config)
        self._thread: int | None = None  # the one whose settings were made last
        self._runner: ModelRunner | None = None
        self._pending: deque[PendingStep] = deque()
        self._profile: Profile | None = None

    def start(self) -> WorkerInfo:
        """Place, build, size, warm: join the other ranks, load the model, allocate the KV cache, warm the first step.

        Raises ConfigError or CheckpointError with what to change.
        """
        placed = place(self._config, self._rank, self._local_rank, self._rendezvous)
        self._device = placed.device
        self._enter_thread()
        with torch.inference_mode():
            parts = build(self._config, placed)
            num_blocks = parts.size(placed.build.max_model_len)
            self._runner = parts.warm(num_blocks)
        notes = [*placed.notes, kv_sizing.describe(parts.cache.spec, num_blocks), *parts.notes]
        if self._device.type == "cpu":
            notes.append(f"threads: {self._threads}")
        elif parts.graphs is not None:
            notes.append(parts.graphs.note)
        dtype = str(placed.build.dtype).removeprefix("torch.")
        return parts.features.started(WorkerInfo(num_blocks, str(self._device), dtype, notes))

    def execute(self, step: SchedulerOutput) -> list[ModelRunnerOutput]:
        """Run the step; returns the outputs that are ready, in the order of their steps."""
        assert self._runner is not None, "execute before start"
        self._enter_thread()
        with torch.inference_mode():
            self._pending.append(self._runner.execute(step))
            keep = 1 if self._device.type == "cuda" and not step.flush else 0
            outputs = [self._pending.popleft().finish() for _ in range(len(self._pending) - keep)]
            if outputs:
                self._runner.report(outputs[-1])
            return outputs

    def start_profile(self, directory: str) -> None:
        """Record every step from now on; InvalidRequestError where that is done already."""
        if self._profile is not None:
            raise InvalidRequestError("a profile is being recorded: stop it first")
        self._profile = Profile(directory, self._rank, self._device.type)

    def stop_profile(self) -> str:
        """The path of the trace; InvalidRequestError where nothing is recorded."""
        if self._profile is None:
            raise InvalidRequestError("no profile is being recorded")
        path = self._profile.stop()
        self._profile = None
        return path

    def memory_snapshot(self, directory: str) -> str:
        """The path of a dump of what CUDA's allocator holds; UnsupportedError on a CPU."""
        return dump_memory(directory, self._rank, self._device.type)

    def shutdown(self) -> None:
        """Free the model and the KV cache; idempotent."""
        if self._profile is not None:  # a process that ends within a recording crashes
            try:
                self.stop_profile()
            except Exception as error:
                logger.warning("the profile is lost", exc_info=error)
        self._pending.clear()
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        leave_groups()
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _enter_thread(self) -> None:
        """A compiled graph calls `execute` from another thread than `start`."""
        if self._thread != threading.get_ident():
            enter_thread(self._device, self._threads)
            self._thread = threading.get_ident()
