"""`manta serve` with pooling models: mistakes are found before Ray starts, the rest is let through."""

from __future__ import annotations

import pytest

from app.cli import serve
from app.cli.machine import Machine
from benchmarks.serve_process import free_port
from tests.cli.conftest import Manta
from tests.tiny_encoders import tiny_encoder


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that would have served, on a known machine."""
    commands: list[str] = []

    def stop(*command: object) -> None:
        commands.append(str(command))
        raise SystemExit(0)

    monkeypatch.setattr(serve, "find_machine", lambda: Machine("this machine", 8, 0, 16 << 30, None))
    monkeypatch.setattr(serve.os, "execve", stop)
    return commands


def test_mistakes(manta: Manta, served: list[str]) -> None:
    encoder = tiny_encoder("bert")
    assert "runner=generate" in manta("serve", encoder, "--runner", "generate").mistake
    assert "one stage" in manta("serve", encoder, "--pipeline-parallel-size", 2).mistake
    assert "max_num_batched_tokens=64" in manta("serve", encoder, "--max-num-batched-tokens", 64).mistake
    assert "unknown architecture" in manta("serve", tiny_encoder("qwen3"), "--runner", "generate").mistake
    assert not served


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_good_models_are_let_through(manta: Manta, served: list[str], family: str) -> None:
    with pytest.raises(SystemExit):
        manta("serve", tiny_encoder(family), "--port", free_port())
    assert len(served) == 1
