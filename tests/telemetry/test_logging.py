"""Set-up of the logger."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.telemetry.logging import JsonFormatter, configure_logging, log_formatter


def test_idempotent() -> None:
    handlers = list(configure_logging("warning").handlers)
    assert configure_logging("info").handlers == handlers
    assert logging.getLogger("manta.engine").getEffectiveLevel() == logging.INFO


def test_the_engine_s_loggers_are_below_manta() -> None:
    """A logger of another name has no handler and no level: in a replica its lines would be lost."""
    app = Path(__file__).parents[2] / "app"
    rooms = (
        "engine",
        "worker",
        "models",
        "loading",
        "layers",
        "quantization",
        "distributed",
        "checkpoints",
        "structured",
    )
    files = [file for room in rooms for file in (app / room).rglob("*.py")]
    names = [name for file in files for name in re.findall(r"getLogger\((.*?)\)", file.read_text(encoding="utf-8"))]
    assert len(names) >= 5
    assert all(name.startswith('"manta.') for name in names)


def test_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTA_LOG_LEVEL", "chatty")
    with pytest.raises(ConfigError, match="MANTA_LOG_LEVEL: unknown level 'CHATTY'"):
        configure_logging()


def test_the_form_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTA_LOG_FORMAT", "JSON")
    assert isinstance(log_formatter(), JsonFormatter)
    monkeypatch.setenv("MANTA_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="MANTA_LOG_FORMAT: unknown format 'xml'; text or json"):
        configure_logging()
