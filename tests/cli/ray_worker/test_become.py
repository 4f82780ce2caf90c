"""A worker process of Ray begins as with Ray's own script, which is the judge, without importing Ray for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private import node, ray_constants
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.core.generated.common_pb2 import Language

from app.cli.quick_ray import quick_ray
from app.cli.ray_worker import become
from tests.test_architecture import ROOT

COMMAND = ["default_worker.py", "--node-ip-address=127.0.0.1", "--name=two words", "--object-store-name=a'b"]
VARIABLES = {"PLAIN": "1", "JOINED": "${BASE}:here", "GONE": "${NOBODY_HAS_THIS}x", "QUOTED": "a 'b' \"c\""}


class BecameError(Exception):
    """Stands in for the end of the process, which became another."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the process became: a command's words."""
    commands: list[list[str]] = []

    def execv(program: str, words: list[str]) -> None:
        commands.append([program, *words[1:]])
        raise BecameError

    def execvp(program: str, args: list[str]) -> None:  # Ray's way, by a shell
        assert (program, args[:2]) == ("bash", ["bash", "-c"])
        run, *words = shlex.split(args[2])
        assert run == "exec"
        commands.append(words)
        raise BecameError

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(os, "execvp", execvp)
    return commands


def ours(context: RuntimeEnvContext, language: str = "PYTHON") -> dict[str, str]:
    """The environment after ours has become something."""
    with pytest.raises(BecameError):
        become.become([*COMMAND, f"--serialized-runtime-env-context={context.serialize()}", f"--language={language}"])
    return dict(os.environ)


def test_it_becomes_what_rays_own_script_does(became: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE", "/base")
    for name in VARIABLES:
        monkeypatch.setenv(name, "before")
    for context in (
        RuntimeEnvContext(),
        RuntimeEnvContext(env_vars=VARIABLES),
        RuntimeEnvContext(py_executable="/bin/true"),
    ):
        before = dict(os.environ)
        with pytest.raises(BecameError):
            context.exec_worker(COMMAND, Language.Value("PYTHON"))
        judge = dict(os.environ)
        os.environ.update(before)
        assert ours(context) == judge
        assert became[-1] == became[-2]
        os.environ.update(before)


@pytest.mark.parametrize(
    ("context", "language"),
    [
        (RuntimeEnvContext(command_prefix=["nice", "&&"]), "PYTHON"),
        (RuntimeEnvContext(override_worker_entrypoint="/elsewhere/default_worker.py"), "PYTHON"),
        (RuntimeEnvContext(py_executable="uv run python"), "PYTHON"),
        (RuntimeEnvContext(py_executable="python3"), "PYTHON"),  # a shell would look for it
        (RuntimeEnvContext(), "JAVA"),
    ],
)
def test_what_is_no_ordinary_worker_is_rays(
    context: RuntimeEnvContext, language: str, became: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(os.environ)
    assert ours(context, language) == before, "Ray sets the environment"
    (words,) = became
    assert words[:2] == [sys.executable, str(Path(node.__file__).parent / "workers/setup_worker.py")]
    assert words[2:] == [*COMMAND, f"--serialized-runtime-env-context={context.serialize()}", f"--language={language}"]
    assert Path(words[1]).exists()


def test_a_process_imports_no_ray_to_become_another() -> None:
    code = "import sys; print([name for name in ('ray', 'numpy', 'app') if name in sys.modules], sys.argv[1:])"
    told = ["-c", code, "first", "--serialized-runtime-env-context={}", "--language=PYTHON", "last one"]
    done = subprocess.run(
        [sys.executable, become.__file__, *told], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[] ['first', 'last one']", done.stderr


def test_a_cluster_of_ours_begins_workers_with_it() -> None:
    with quick_ray({}, dashboard=False):
        place: Any = os.path.join(os.path.dirname(node.__file__), "workers", ray_constants.SETUP_WORKER_FILENAME)
    assert Path(place) == ROOT / "app/cli/ray_worker/become.py"
