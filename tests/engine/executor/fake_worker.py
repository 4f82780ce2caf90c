"""A worker without a model, for the executor's tests: it obeys commands hidden in a step message's `new_blocks`."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import ray
from ray.util.placement_group import get_current_placement_group

from app.errors import CheckpointError, ConfigError
from app.records.step import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from app.records.worker_info import WorkerInfo

FAKE_WORKER = f"{__name__}:FakeWorker"
SLEEP_MS, FAIL, KILL, STOP, LARGE, ONLY_RANK = range(6)


def make_step_message(
    step_id: int, *commands: tuple[int, int], rows: int = 3, padding: int = 0, flush: bool = False
) -> SchedulerOutput:
    """A step message of `rows` decodes; each command is (code, argument), `padding` adds bytes to it."""
    blocks = [(code, [argument]) for code, argument in commands]
    step_message = SchedulerOutput(
        step_id, np.arange(rows, dtype=np.int32), np.ones(rows, np.int32), np.ones(rows, np.bool_), new_blocks=blocks
    )
    step_message.flush = flush
    step_message.freed_rows = list(range(1 << 20, (1 << 20) + padding // 5))
    return step_message


def expected_tokens(step_message: SchedulerOutput) -> list[int]:
    """What FakeWorker samples for a step message."""
    return [int(row) * 2 + step_message.step_id + len(step_message.freed_rows) for row in step_message.rows]


class FakeWorker:
    """Answers each step message at once with its own output; counts what it executes."""

    def __init__(self, config: object, rank: int, world_size: int, local_rank: int, rendezvous: object) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank

    def start(self) -> WorkerInfo:
        notes = [f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}"]
        notes += [f"{name}={value}" for name, value in os.environ.items() if name.startswith("RAY_CGRAPH_")]
        group = get_current_placement_group() if ray.is_initialized() else None
        notes.append(f"placement group={group.id.hex() if group else None}")
        notes.append(f"place={self.rank},{self.world_size},{self.local_rank}")
        return WorkerInfo(num_blocks=100 - self.rank, device="cpu", dtype="float32", notes=notes)

    def execute(self, step_message: SchedulerOutput) -> list[ModelRunnerOutput]:
        output = ModelRunnerOutput(step_message.step_id, np.array(expected_tokens(step_message), np.int32))
        for code, (argument,) in step_message.new_blocks:
            if code == ONLY_RANK and argument != self.rank:
                break  # the commands after it are not for this rank
            if code == SLEEP_MS:
                time.sleep(argument / 1000)
            elif code == FAIL:
                raise RuntimeError(f"no luck with step {step_message.step_id}")
            elif code == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            elif code == STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600)  # another thread may take the signal: this one must not go on until it has
            elif code == LARGE:
                ranks = list(range(argument))
                output.logprobs = [TokenLogprobs(ranks, [0.5] * argument, ranks)]
        return [output]

    def add_rank(self, number: int, seconds: float = 0.0) -> int:
        """To be called between steps."""
        time.sleep(seconds)
        if number < 0:
            raise ConfigError("number must not be negative", param="number")
        return 100 // number + self.rank

    def shutdown(self) -> None:
        pass


class DelayedWorker(FakeWorker):
    """As a GPU worker does (I2): a call returns the output of the call before, and a flush drains."""

    def __init__(self, config: object, rank: int, world_size: int, local_rank: int, rendezvous: object) -> None:
        super().__init__(config, rank, world_size, local_rank, rendezvous)
        self.pending: list[ModelRunnerOutput] = []

    def execute(self, step_message: SchedulerOutput) -> list[ModelRunnerOutput]:
        self.pending += super().execute(step_message)
        keep = 0 if step_message.flush else 1
        ready, self.pending = self.pending[: len(self.pending) - keep], self.pending[len(self.pending) - keep :]
        return ready


class BrokenWorker(FakeWorker):
    """A model directory that cannot be read."""

    def start(self) -> WorkerInfo:
        raise CheckpointError("tensor model.norm.weight is missing", param="model")


class DyingWorker(FakeWorker):
    """Dies while it loads."""

    def start(self) -> WorkerInfo:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class HalfHangingWorker(FakeWorker):
    """Rank 1 never gets ready."""

    def start(self) -> WorkerInfo:
        if self.rank == 1:
            time.sleep(600)
        return super().start()


class DyingInWarmUpWorker(FakeWorker):
    """Dies in its first step."""

    def execute(self, step_message: SchedulerOutput) -> list[ModelRunnerOutput]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class HalfBrokenWorker(FakeWorker):
    """Rank 1 finds its checkpoint unusable while rank 0 waits for it."""

    def start(self) -> WorkerInfo:
        if self.rank == 1:
            raise CheckpointError("tensor model.norm.weight is missing", param="model")
        time.sleep(600)
        raise AssertionError("unreachable")
