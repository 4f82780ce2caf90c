"""Coding agents as they are published, set up and run as docs/coding_agents.md says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.serve_process import ROOT
from tests.docs.pages import DOCS, blocks, section
from tests.e2e.agents.known_answers import ASK
from tests.limits import patience_s

INSTALLED = ROOT / "build/coding_agents"  # remove it to try the newest versions
PAGE = DOCS / "coding_agents.md"
_FILE = re.compile(r"[Ii]n `([^`]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(slots=True, frozen=True)
class Program:
    """One of them: its name on the page, its command, and the package that has it."""

    title: str
    command: str
    package: str

    @property
    def is_python(self) -> bool:
        return not self.package.startswith("npm:")

    def install(self) -> None:
        """Install it where it is not yet; skip the test where that cannot be done."""
        folder = INSTALLED / self.command
        if (self._programs() / self.command).exists():
            return
        if self.is_python:
            steps = [
                [sys.executable, "-m", "venv", folder],
                [folder / "bin/python", "-m", "pip", "install", self.package],
            ]
        else:
            if shutil.which("npm") is None:
                pytest.skip(f"{self.title} needs npm")
            steps = [
                ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, self.package.removeprefix("npm:")]
            ]
        for step in steps:
            done = _run(step, dict(os.environ), ROOT)
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                pytest.skip(f"{self.title} cannot be installed: {done.stderr[-500:]}")

    def version(self) -> str:
        """What it says of itself."""
        environment = {**os.environ, "HOME": str(INSTALLED), "PATH": self._path()}
        words = _run([self.command, "--version"], environment, INSTALLED).stdout.split()
        return next(word for word in words if word[0].isdigit())

    def run(self, ask: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Let it do as `ask` says in `folder`/work; `folder` is its home, and has the temporary files beside the work:
        Codex keeps no programs for its sandbox among those."""
        work = folder / "work"
        (folder / "tmp").mkdir(parents=True)
        work.mkdir()
        text = section(PAGE.read_text(), self.title).replace("http://127.0.0.1:8000", url).replace(ASK, ask)
        for name, body in _FILE.findall(text):
            file = folder / name.removeprefix("~/") if name.startswith("~/") else work / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(body)
        script = "".join(blocks(text, "bash"))
        home = {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "PATH": self._path()}
        return _run(["bash", "-e", "-c", script], {**_without_keys(), **home}, work)

    def _programs(self) -> Path:
        return INSTALLED / self.command / ("bin" if self.is_python else "node_modules/.bin")

    def _path(self) -> str:
        return f"{self._programs()}{os.pathsep}{os.environ['PATH']}"


PROGRAMS = (
    Program("Codex CLI", "codex", "npm:@openai/codex"),
    Program("Claude Code", "claude", "npm:@anthropic-ai/claude-code"),
    Program("opencode", "opencode", "npm:opencode-ai"),
    Program("aider", "aider", "aider-chat"),
    Program("Continue's cn", "cn", "npm:@continuedev/cli"),
)


def _run(argv: Sequence[str | Path], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=patience_s(300), check=False,
    )  # fmt: skip


def _without_keys() -> dict[str, str]:
    """The environment without what would lead a program to another server."""
    told = re.compile("OPENAI|ANTHROPIC|CLAUDE|CODEX|OPENCODE|AIDER|CONTINUE|PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not told.match(name)}
