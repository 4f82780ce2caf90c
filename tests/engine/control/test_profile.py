"""Profiles through the table of control calls; the traces themselves: tests/offline/test_llm.py."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine import control
from app.engine.control import profile
from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from tests.engine.core_driver import make_core, make_request
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
    assert control.run(core, "stop_profile", {}) == ["rank-0", "rank-1"]
    control.run(core, "start_profile", {"directory": "/traces"})
    assert [call[0] for call in calls] == ["start_profile", "stop_profile", "start_profile"]


def test_a_bounded_recording_ends_by_itself() -> None:
    core, calls = _core_with_calls()
    core.add_request(make_request("a", [1, 2, 3], max_tokens=30))
    options = {"directory": "/traces", "num_steps": 5, "max_s": 60.0}
    before = core.stats().steps_total
    assert control.run(core, "record_profile", options) == ["rank-0", "rank-1"]
    assert calls == [("start_profile", "/traces"), ("stop_profile",)]
    assert 5 <= core.stats().steps_total - before <= 5 + core.config.max_inflight_steps
    assert core.has_work(), "the request goes on"
    assert control.run(core, "stop_profile", {}) == ["rank-0", "rank-1"], "whoever asks later hears of the files"
    assert len(calls) == 2


def test_a_bounded_recording_of_an_idle_engine_ends_in_time() -> None:
    core, calls = _core_with_calls()
    control.run(core, "record_profile", {"directory": "/traces", "num_steps": 5, "max_s": 0.01})
    assert [call[0] for call in calls] == ["start_profile", "stop_profile"]


def test_a_recording_can_be_stopped_and_taken_back() -> None:
    core, calls = _core_with_calls()
    options = {"directory": "/traces", "num_steps": 5, "max_s": 60.0}
    call = control.begin(core, "record_profile", options)
    next(call)
    assert control.run(core, "stop_profile", {}) == ["rank-0", "rank-1"]
    assert list(call) == []
    call = control.begin(core, "record_profile", options)
    next(call)
    call.close()
    assert not core.is_profiling
    assert [call[0] for call in calls] == ["start_profile", "stop_profile"] * 2


@pytest.mark.parametrize(("option", "value"), [("num_steps", 0), ("num_steps", 1001), ("max_s", 0.0), ("max_s", 121.0)])
def test_a_recording_has_bounds(option: str, value: float) -> None:
    core, calls = _core_with_calls()
    options = {"directory": "/traces", "num_steps": 5, "max_s": 1.0, option: value}
    with pytest.raises(InvalidRequestError, match=option):
        control.run(core, "record_profile", options)
    assert calls == []


def _core_with_calls(refused: str = "") -> tuple[EngineCore, list[tuple[Any, ...]]]:
    """A core of two ranks and what they are asked."""
    core, calls = make_core(), []
    assert isinstance(core.executor, FakeExecutor)

    def call(method: str, *arguments: Any) -> list[Any]:
        calls.append((method, *arguments))
        if method == refused:
            raise InvalidRequestError("worker rank 1: directory: no space", param="directory")
        return ["rank-0", "rank-1"] if method == "stop_profile" else [None, None]

    core.executor.call = call  # type: ignore[method-assign]
    return core, calls
