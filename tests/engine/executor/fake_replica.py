"""Stands for a Serve replica in the executor's tests; in a module of its own so that other processes find it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ray

from app.config.engine import EngineConfig
from app.engine.executor.ray_workers import RayWorkersExecutor
from app.records.worker_info import WorkerInfo
from tests.engine.executor.fake_worker import FAKE_WORKER, expected_tokens, make_step_message


class Replica:
    """An actor in bundle 0 of its placement group that drives the engine from a thread."""

    def run(self, transport: str) -> tuple[str, WorkerInfo, list[int], list[str]]:
        """Its placement group, and what is known of its workers: information, processes, names."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._drive, transport).result()

    def _drive(self, transport: str) -> tuple[str, WorkerInfo, list[int], list[str]]:
        executor = RayWorkersExecutor(EngineConfig(step_transport=transport), FAKE_WORKER)
        info = executor.start()
        names = ray.util.list_named_actors()
        step_message = make_step_message(5)
        executor.submit(step_message)
        (output,) = executor.collect()
        assert output.sampled_token_ids.tolist() == expected_tokens(step_message)
        executor.park()
        pids = executor.worker_pids
        executor.shutdown()
        return ray.util.get_current_placement_group().id.hex(), info, pids, names
