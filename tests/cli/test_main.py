"""Exit codes, and what is imported when."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.cli import COMMANDS
from app.cli.parser import build_parser, parse
from app.errors import ConfigError
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


def test_a_command_does_without_what_the_others_import() -> None:
    alone, all_of_them = build_parser(COMMANDS, "models"), build_parser(COMMANDS, "unknown")
    assert [parse(all_of_them, words).command for words in (["models"], ["config"])] == ["models", "config"]
    assert parse(alone, ["models"]).command == "models"
    with pytest.raises(ConfigError, match="invalid choice"):
        parse(alone, ["config"])
    code = (
        "import sys\nfrom app.cli import main\n"
        "try:\n    main(['models', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('app.cli.chat' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
