"""The reasons for which an engine that an operator has put aside takes no requests, or lets them wait."""

from __future__ import annotations

from app.records.engine_state import EngineState


def test_requests_wait_as_long_as_anything_holds_them() -> None:
    state = EngineState()
    assert (state.is_paused, state.refusal) == (False, None)
    state.holds |= {"pause", "update"}
    state.holds.discard("pause")
    assert state.is_paused


def test_what_is_missing_is_named_with_the_way_out() -> None:
    asleep = EngineState(asleep=frozenset({"weights", "kv_cache"}), sleep_level=2)
    assert "asleep (level 2): wake_up" in (asleep.refusal or "")
    without = EngineState(weights_missing=True)
    assert "reload_weights or update_weights" in (without.refusal or "")
    without.is_updating = True
    assert without.refusal is None
