"""Profiles through the table of control calls; the traces themselves: tests/offline/test_llm.py."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine import control
from app.engine.control import profile
from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from tests.engine.core_driver import make_core
from tests.engine.fake_executor import FakeExecutor


def test_a_rank_that_cannot_record_leaves_none_recording() -> None:
    core, calls = _core_with_calls(refused="start_profile")
    with pytest.raises(InvalidRequestError, match="worker rank 1"):
        profile.start_profile(core, "/traces")
    assert calls == [("start_profile", "/traces"), ("stop_profile",)]


def test_a_second_recording_is_refused_without_asking_the_workers() -> None:
    core, calls = _core_with_calls()
    control.run(core, "start_profile", {"directory": "/traces"})
    with pytest.raises(InvalidRequestError, match="stop it first"):
        control.run(core, "start_profile", {"directory": "/traces"})
    assert control.run(core, "stop_profile", {}) == [None, None]
    control.run(core, "start_profile", {"directory": "/traces"})
    assert [call[0] for call in calls] == ["start_profile", "stop_profile", "start_profile"]


def _core_with_calls(refused: str = "") -> tuple[EngineCore, list[tuple[Any, ...]]]:
    """A core of two ranks and what they are asked."""
    core, calls = make_core(), []
    assert isinstance(core.executor, FakeExecutor)

    def call(method: str, *arguments: Any) -> list[Any]:
        calls.append((method, *arguments))
        if method == refused:
            raise InvalidRequestError("worker rank 1: directory: no space", param="directory")
        return [None, None]

    core.executor.call = call  # type: ignore[method-assign]
    return core, calls
