"""Exit codes, and what is imported when."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.cli import COMMANDS
from app.version import VERSION
from benchmarks.serve_process import ROOT
from tests.cli.conftest import Manta


def test_heavy_packages_are_not_imported_for_help() -> None:
    code = (
        "import sys\nfrom app.cli import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit:\n    pass\n"
        "main(['config'])\n"
        "print(sorted({'torch', 'ray', 'transformers', 'triton'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_version(capsys: pytest.CaptureFixture[str], manta: Manta) -> None:
    with pytest.raises(SystemExit):
        manta("--version")
    assert capsys.readouterr().out.strip() == f"manta {VERSION}"


def test_no_command(manta: Manta) -> None:
    assert "COMMAND" in manta().mistake


def test_interrupt(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.cli.config.resolve", interrupted)
    assert manta("config").code == 130


def test_a_reader_that_goes_away() -> None:
    command = f"{sys.executable} -m app.cli config | head -c 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_every_command_is_in_the_table() -> None:
    assert [COMMANDS.load(name).help for name in COMMANDS]
