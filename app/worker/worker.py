"""One rank of an engine, wherever it runs: in this process, or inside an actor.

Step messages are executed one after another. On a device that computes in the background, a call enqueues its step and
returns the outputs of the steps before; a `flush` message returns everything (I2). On a CPU a call returns its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from app.config.engine import EngineConfig
from app.distributed.process_groups import leave_groups
from app.distributed.weight_transfer import WeightReceiver
from app.errors import InvalidRequestError
from app.heap import collect_heap, set_aside
from app.loading.weight_update import GivenTensor
from app.platforms import platform_of
from app.records.state_pool import StatePool
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.records.worker_info import RendezvousInfo, WorkerInfo
from app.worker import kv_sizing
from app.worker.build import build
from app.worker.build.parts import Parts
from app.worker.device import enter_thread, num_threads
from app.worker.memory_snapshot import dump_memory
from app.worker.model_runner import ModelRunner
from app.worker.placement import place
from app.worker.profile import Profile
from app.worker.rows.pending_step import PendingStep
from app.worker.weights import Weights

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
        self._platform = platform_of(self._device)
        self._threads = num_threads(config)
        self._thread: int | None = None  # the one whose settings were made last
        self._runner: ModelRunner | None = None
        self._pending: deque[PendingStep] = deque()
        self._profile: Profile | None = None
        self._parts: Parts | None = None
        self._weights: Weights | None = None
        self._receiver: WeightReceiver | None = None

    def start(self) -> WorkerInfo:
        """Place, build, size, warm: join the other ranks, load the model, allocate the KV cache, warm the first step.

        Raises ConfigError or CheckpointError with what to change.
        """
        placed = place(self._config, self._rank, self._local_rank, self._rendezvous)
        self._device = placed.device
        self._platform = platform_of(self._device)
        self._enter_thread()
        with torch.inference_mode():
            parts = build(self._config, placed)
            with self._looked_at_once():
                num_blocks = parts.size(placed.build.max_model_len)
                self._runner = parts.warm(num_blocks)
        spec = parts.cache.spec
        self._parts, self._weights = parts, Weights(parts.model, self._config, placed, parts.features.models)
        held = self._config.max_num_seqs, parts.cache.num_slots
        sizes = kv_sizing.describe(spec, num_blocks, placed.build.max_model_len, *held)
        notes = [*placed.notes, *sizes, *parts.notes]
        if not self._platform.is_async:
            notes.append(f"threads: {self._threads}")
        elif parts.graphs is not None:
            notes.append(parts.graphs.note)
        dtype = str(placed.build.dtype).removeprefix("torch.")
        states = StatePool(spec.bytes_per_state, parts.cache.num_slots, spec.blocks_per_state)
        info = WorkerInfo(
            num_blocks,
            str(self._device),
            dtype,
            notes,
            num_deferred=parts.num_deferred,
            kv_windows=spec.windows,
            states=states if spec.states else None,
        )
        return parts.features.report_start(info)

    def execute(self, step: SchedulerOutput) -> list[ModelRunnerOutput]:
        """Run the step; returns the outputs that are ready, in the order of their steps."""
        assert self._runner is not None, "execute before start"
        self._enter_thread()
        with torch.inference_mode():
            self._pending.append(self._runner.execute(step))
            keep = 1 if self._platform.is_async and not step.flush else 0
            outputs = [_finished(self._pending.popleft()) for _ in range(len(self._pending) - keep)]
            if outputs:
                self._runner.report(outputs[-1])
            return outputs

    # ---- control calls, between steps

    def sleep(self, level: int) -> None:
        """Give the memory of weights and KV cache back: the weights wait in host memory (1) or are dropped (2)."""
        with self._between_steps() as (parts, weights):
            parts.features.weights_leave()
            weights.sleep(level)
            parts.cache.free()

    def wake_up(self, tags: list[str]) -> None:
        """Memory again for `weights` and `kv_cache`; the KV cache is empty, weights of level 2 have no contents."""
        with self._between_steps() as (parts, weights):
            if "weights" in tags and weights.wake():
                parts.features.weights_return()
            if "kv_cache" in tags:
                parts.cache.restore()
                parts.features.connect(parts.cache.places)

    def recapture(self) -> int:
        """The graphs of static steps over weights and KV cache as they lie now; how many are left for idle time."""
        with self._between_steps() as (parts, _):
            self._runner = parts.again()
            return parts.num_deferred

    def capture_next(self) -> int:
        """One more graph of those that the start left out, while nothing runs; how many are left after it."""
        with self._weights_only():
            return 0 if self._parts is None else self._parts.capture_next()

    def call_feature(self, method: str, *arguments: Any) -> Any:
        """The result of a feature's own method (WorkerFeature.calls)."""
        with self._weights_only():
            assert self._parts is not None, "a call before start"
            return self._parts.features.call(method, arguments)

    def check_weights(self, directory: str) -> None:
        """CheckpointError unless a checkpoint could replace the weights."""
        with self._weights_only() as weights:
            weights.check(directory)

    def begin_update(self, whole: bool) -> None:
        """Weights are going to be replaced, `whole`: all of them; until `finish_update` no step may run."""
        with self._weights_only() as weights:
            weights.begin(whole=whole)
            if self._parts is not None:
                self._parts.features.weights_change(whole)

    def load_directory(self, directory: str) -> None:
        """Take in a whole checkpoint; the model's own where `directory` is empty."""
        with self._weights_only() as weights:
            weights.load_directory(directory)

    def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Take in tensors by their names in the checkpoint."""
        with self._weights_only() as weights:
            weights.load({name: GivenTensor.of(name, tensor) for name, tensor in tensors})

    def finish_update(self, whole: bool) -> int:
        """The weights are all there; `whole`: refuse less than all of them. How many graphs are left for idle time."""
        with self._weights_only() as weights:
            moved = weights.finish(whole=whole)
            if self._parts is not None:
                self._parts.features.weights_return()
        if moved and self._parts is not None and not self._parts.cache.is_free:
            return self.recapture()
        return 0 if self._parts is None else self._parts.num_deferred

    def join_transfer(self, host: str, port: int, rank_offset: int, world_size: int) -> None:
        """Connect to the process that sends weights; InvalidRequestError where it is not there."""
        self._enter_thread()
        self._receiver = WeightReceiver(host, port, rank_offset + self._rank, world_size, self._device)

    def receive_tensors(self, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Take in tensors (name, type, shape) from the process that sends weights, one after another."""
        if self._receiver is None:
            raise InvalidRequestError("no weight transfer has been set up: init_weight_transfer_engine first")
        with self._weights_only() as weights:
            for name, dtype, shape in tensors:
                weights.load({name: GivenTensor.of(name, self._receiver.receive(dtype, shape), "the transfer")})

    @contextmanager
    def _between_steps(self) -> Iterator[tuple[Parts, Weights]]:
        """Memory is about to move: without graphs, which know addresses, and without what the allocator keeps."""
        assert self._parts is not None, "a call before start"
        assert self._runner is not None
        with self._weights_only() as weights:
            self._runner.release_graphs()
            yield self._parts, weights
            if (runtime := self._platform.runtime) is not None:
                runtime.synchronize(self._device)
                collect_heap()
                runtime.empty_cache()

    @contextmanager
    def _weights_only(self) -> Iterator[Weights]:
        assert self._weights is not None, "a call before start"
        assert not self._pending, "a call with a step outstanding"
        self._enter_thread()
        with torch.inference_mode():
            if self._parts is not None:
                self._parts.features.settle()
            yield self._weights

    def start_profile(self, directory: str) -> None:
        """Record every step from now on; InvalidRequestError where that is done already."""
        if self._profile is not None:
            raise InvalidRequestError("a profile is being recorded: stop it first")
        self._profile = Profile(directory, self._rank, self._device)

    def stop_profile(self) -> str:
        """The path of the trace; InvalidRequestError where nothing is recorded."""
        if self._profile is None:
            raise InvalidRequestError("no profile is being recorded")
        path = self._profile.stop()
        self._profile = None
        return path

    def memory_snapshot(self, directory: str) -> str:
        """The path of a dump of what the device's allocator holds; UnsupportedError on a CPU."""
        return dump_memory(directory, self._rank, self._device)

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
            if self._parts is not None and self._parts.model.offload is not None:
                self._parts.model.offload.close()
            self._runner = self._parts = self._weights = self._receiver = None
        leave_groups()
        if (runtime := self._platform.runtime) is not None:
            collect_heap()
            runtime.empty_cache()

    @contextmanager
    def _looked_at_once(self) -> Iterator[None]:
        """Measuring a device and capturing graphs collects what holds its memory, a dozen times: of what was imported
        and loaded once is enough."""
        if not self._platform.is_async:
            yield
            return
        collect_heap()
        with set_aside():
            yield

    def _enter_thread(self) -> None:
        """A compiled graph calls `execute` from another thread than `start`."""
        if self._thread != threading.get_ident():
            enter_thread(self._device, self._threads)
            self._thread = threading.get_ident()


def _finished(step: PendingStep) -> ModelRunnerOutput:
    was_over = step.is_done()
    output = step.finish()
    output.was_over = was_over
    return output
