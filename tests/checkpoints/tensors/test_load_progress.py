"""A long load speaks every few seconds, a short one never."""

from __future__ import annotations

import logging

import pytest

from app.checkpoints.tensors.load_progress import INTERVAL_S, SILENT_S, LoadProgress


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("manta"), "propagate", True)
    caplog.set_level(logging.INFO, "manta.weights")
    return caplog


def load(num_tensors: int, seconds_each: float) -> None:
    now = 100.0
    progress = LoadProgress(8 << 30, clock=lambda: now)
    for _ in range(num_tensors):
        now += seconds_each
        progress.add((8 << 30) // num_tensors)


def test_short_load_is_silent(said: pytest.LogCaptureFixture) -> None:
    load(100, SILENT_S / 101)
    assert not said.records


def test_long_load_speaks_at_a_bounded_rate(said: pytest.LogCaptureFixture) -> None:
    load(80, 0.125)
    messages = [record.getMessage() for record in said.records]
    assert len(messages) == pytest.approx(1 + (10 - SILENT_S) / INTERVAL_S, abs=1)
    assert messages[0] == "weights:  20 % of 8.0 GiB, 2 s, about 8 s left"
