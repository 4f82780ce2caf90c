"""Decides where the workers run: executors by their names in the configuration (app/backends.py)."""

from __future__ import annotations

from app.backends import EXECUTORS
from app.config.engine import EngineConfig
from app.engine.executor.base import Executor


def create_executor(config: EngineConfig) -> Executor:
    """The executor that `config.executor` names, not started yet."""
    executor: Executor = EXECUTORS.load(config.executor)(config)
    return executor
