"""Descriptions of GGUF files go into a folder of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.checkpoints.gguf.description import describe


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    describe.cache_clear()
