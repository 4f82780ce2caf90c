"""Worker groups whose ranks all compute on the first GPU: what several GPUs would run, where there is only one.

Same kernels, graphs, collectives, processes and transports; but NCCL goes over sockets, and the ranks take turns on
the device, so times say nothing about several GPUs. For checks of tokens, of starts and stops, and of failures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from app.config.engine import EngineConfig
from app.engine.executor.worker_group_executor import WorkerGroupExecutor
from app.records.worker_info import RendezvousInfo
from app.worker.worker import Worker


def one_gpu_worker(
    config: EngineConfig, rank: int, world_size: int, _: int, rendezvous: RendezvousInfo | None
) -> Worker:
    """A rank that takes the first device, whatever its number."""
    # NCCL refuses two ranks of one host on one device, so every rank says that it is a host of its own.
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return Worker(config, rank, world_size, 0, rendezvous)


@contextmanager
def worker_groups_on_one_gpu(wanted: bool = True) -> Iterator[None]:
    """Every worker group that this process starts within has such workers; nothing changes if not `wanted`."""
    original = WorkerGroupExecutor.__init__

    def init(executor: WorkerGroupExecutor, config: EngineConfig, worker_class: str = "") -> None:
        original(executor, config, f"{__name__}:{one_gpu_worker.__name__}")

    WorkerGroupExecutor.__init__ = init if wanted else original  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkerGroupExecutor.__init__ = original  # type: ignore[method-assign]
