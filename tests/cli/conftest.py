"""The command as a function: exit code and what it printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.cli import main
from app.cli.serve_ports import SERVE_PORTS
from app.cli.server_options import KEY_VARIABLES
from benchmarks.serve_process import free_port


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def mistake(self) -> str:
        """The one line of a mistake: exit code 2, nothing on stdout, no traceback."""
        assert self.code == 2
        assert self.err.startswith("manta: error: ")
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        return self.err.removeprefix("manta: error: ").strip()


Manta = Callable[..., Done]


@pytest.fixture
def manta(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Manta:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # tests have no network
    for name in SERVE_PORTS:  # a server may run beside the tests
        monkeypatch.setenv(name, str(free_port()))
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*argv: object) -> Done:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run
