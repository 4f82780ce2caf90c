"""A driver in a process of its own, for tests that kill it: starts an executor, prints its workers, gets stuck."""

from __future__ import annotations

import signal
import sys

import ray

from app.config.engine import EngineConfig
from app.engine.executor.ray_workers import RayWorkersExecutor
from tests.engine.executor.fake_worker import FAKE_WORKER, SLEEP_MS, make_step_message


def main(address: str, transport: str, state: str) -> None:
    ray.init(address=address, log_to_driver=False)
    executor = RayWorkersExecutor(EngineConfig(step_transport=transport), FAKE_WORKER)
    executor.start()
    if state == "stepping":
        executor.submit(make_step_message(0, (SLEEP_MS, 600_000)))
    elif state == "parked":
        executor.park()
    print("pids", *executor.worker_pids, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
