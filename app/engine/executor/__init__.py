"""Where the workers run: the table of executors."""

from __future__ import annotations

from app.config import EngineConfig
from app.engine.executor.base import Executor
from app.registry import Registry

EXECUTORS: Registry[type[Executor]] = Registry(
    "executor",
    {
        "in_process": "app.engine.executor.in_process:InProcessExecutor",
        "local_processes": "app.engine.executor.local_processes:LocalProcessesExecutor",
        "ray_workers": "app.engine.executor.ray_workers:RayWorkersExecutor",
    },
)


def create_executor(config: EngineConfig) -> Executor:
    """The executor that `config.executor` names, not started yet."""
    return EXECUTORS.load(config.executor)(config)  # type: ignore[call-arg]  # each takes (config, ...) in __init__
