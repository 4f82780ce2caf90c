"""How a test run leaves: with its verdict, whatever happens after it (conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
CRASH = "import ctypes\ndef test(): ctypes.CDLL(None).__cxa_atexit(ctypes.c_void_p(0xDEAD), 0, 0)\n"


@pytest.mark.parametrize(
    ("test", "options", "code"),
    [
        ("def test(): pass\n", [], 0),
        ("def test(): assert False\n", [], 1),
        (CRASH, [], 0),
        (CRASH + "def test_wrong(): assert False\n", [], 1),
        ("def test(): pass\n", ["--junitxml=/dev/full"], 1),  # fails after the last test
    ],
)
def test_exit_code(test: str, options: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(CONFTEST.parent.parent)}  # conftest.py imports tests.limits
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "test_it.py" in done.stdout
