"""Replicas of tests send no heartbeats, and a loaded machine may delay a test for longer than a silence may last."""

from __future__ import annotations

import pytest

from app.deployments.channel import channel_client


@pytest.fixture(autouse=True)
def no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels of this process are not given up for silence; a test of that sets the turn anew."""
    monkeypatch.setattr(channel_client, "TURN_S", 3600.0)
