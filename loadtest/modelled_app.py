"""`import_path` of a deployment whose devices are modelled: the real graph over real engines.

Only the workers are replaced, by one that takes as long as the model says and then answers. The capacity does not
depend on what else runs on the machine, so that a load can be a multiple of it.

A request's `seed` is the number of tokens after which its answer ends by itself.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from ray import serve

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.deployments.app import build_graph
from app.deployments.replica.engine_factory import ReplicaEngine
from app.deployments.serve.serve_args import parse_args
from app.engine.async_engine import AsyncEngine
from app.engine.core import EngineCore
from app.engine.executor.base import Executor
from app.records.sampling_params import SamplingParams
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.records.worker_info import WorkerInfo
from loadtest.simulation.speeds import Speeds

NUM_BLOCKS = 8192
WORD = 300  # of tiny-chat's vocabulary: what every answer is made of
SLOWNESS = 5.0  # times an H200's steps: the HTTP path on two cores must not be what is short


def build(args: dict[str, Any]) -> serve.Application:
    """See the head of this file."""
    return build_graph(parse_args(args), create_modelled_engine)


def create_modelled_engine(
    config: EngineConfig, key: bytes, on_outputs: Any, on_fatal: Any, recorder: Any, sink: Any
) -> ReplicaEngine:
    """An EngineFactory: create_engine's engine over a ModelledDevice."""
    device, info = ModelledDevice(), ModelInfo.from_directory(config.model)
    core = EngineCore(config, info, device, key, recorder=recorder, kv_event_sink=sink)
    engine: ReplicaEngine = AsyncEngine(core, on_outputs, on_fatal)
    return engine


class ModelledDevice(Executor):
    """Steps come one after the other, each as long as `speeds` says; tokens are all the same up to the answer's end."""

    def __init__(self) -> None:
        self._speeds = Speeds().slowed(SLOWNESS)
        self._rows: dict[int, _Row] = {}
        self._out: deque[tuple[float, ModelRunnerOutput]] = deque()  # when it comes (monotonic), oldest first
        self._free_at = 0.0

    def start(self) -> WorkerInfo:
        """See Executor."""
        return WorkerInfo(NUM_BLOCKS, "modelled", "none", ["modelled device: no model at all"])

    def submit(self, step_message: SchedulerOutput) -> None:
        """See Executor."""
        for row in step_message.freed_rows:
            self._rows.pop(int(row), None)
        for new in step_message.new_requests:
            work = new.spec.work
            assert isinstance(work, SamplingParams)
            num_before = len(new.token_ids) - new.num_prompt_tokens
            length = work.seed or 1
            self._rows[new.row] = _Row(length - num_before, new.num_computed_tokens, new.eos_token_ids[0])
        seconds = self._seconds(step_message)
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        tokens = [self._rows[row].next_token() for row in step_message.rows[step_message.samples].tolist()]
        output = ModelRunnerOutput(step_message.step_id, np.array(tokens, np.int32), step_time_s=seconds)
        self._out.append((self._free_at, output))

    def collect(self) -> list[ModelRunnerOutput]:
        """See Executor."""
        when, output = self._out.popleft()
        time.sleep(max(0.0, when - time.monotonic()))
        return [output]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """It holds nothing that could be asked for."""
        return []

    def park(self) -> None:
        """It does not spin."""

    def check_health(self) -> None:
        """It is well."""

    def shutdown(self) -> None:
        """It holds nothing."""

    def _seconds(self, step: SchedulerOutput) -> float:
        prefill_s, num_decodes, resident = 0.0, 0, 0
        for row, count in zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True):
            state = self._rows[row]
            if count == 1:
                num_decodes, resident = num_decodes + 1, resident + state.num_computed
            else:
                prefill_s += self._speeds.prefill_s(count, state.num_computed)
            state.num_computed += count
        return self._speeds.step_s(prefill_s, num_decodes, resident) if len(step.rows) else 0.0


class _Row:
    """A request on the device."""

    def __init__(self, num_left: int, num_computed: int, eos: int) -> None:
        self.num_computed = num_computed
        self._num_left = num_left
        self._eos = eos

    def next_token(self) -> int:
        """A word, or the answer's end."""
        self._num_left -= 1
        return WORD if self._num_left > 0 else self._eos
