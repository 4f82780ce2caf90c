"""A worker process that is a copy of a template does what Python does, started anew, which is the judge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from app.cli import worker_template
from app.cli.ray_worker import become
from app.cli.worker_template import DEVICE_MODULES, HOST_MODULES, KINDS, announce, may_be_copied, running
from app.engine.executor.ray_workers import HAS_TORCH
from tests.limits import patience_s, wait_until
from tests.test_architecture import ROOT

# Templates that import small modules in the place of ours and Ray's.
TEMPLATE = """
import contextlib, sys, types
from pathlib import Path
from app.cli import worker_template as template
template.HOST_MODULES, template.DEVICE_MODULES = ("fractions", "no_such_module"), ("wave",)
template.RAY_MODULES = ("colorsys",)
template.ray_ids = types.SimpleNamespace(undrawn=contextlib.nullcontext, are_apart=lambda: sys.argv[2] == "apart")
folder = Path(sys.argv[1])
template.main(folder, [template._listener(folder / kind).detach() for kind in template.KINDS])
"""
# In the place of Ray's: what it finds itself to be.
WORKER = """
import json, os, resource, signal, sys
found = {
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM)],
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "input": sys.stdin.read(),
    "pid": os.getpid(),
    "modules": sorted(sys.modules),
}
print("to the errors", file=sys.stderr)
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(found, file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
print("to the output")
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
ENVIRONMENT.pop("PYTEST_CURRENT_TEST", None)  # another one for each part of a test
OF_ONE_PROCESS = {"argv", "pid", "modules", "environment"}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """That of templates which run."""
    folder = tmp_path_factory.mktemp("t")
    command = [sys.executable, "-c", TEMPLATE, str(folder), getattr(request, "param", "apart")]
    environment = {**ENVIRONMENT, become.FOLDER_VARIABLE: str(folder)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True) as process:
        assert process.stdin is not None
        wait_until(lambda: (folder / "device-ray").exists(), "all sockets are there")
        yield folder
        process.stdin.close()
        assert process.wait(patience_s()) == 0
    wait_until(lambda: not folder.exists(), "a template leaves nothing behind")


def began(
    tmp_path: Path, folder: Path | None, interrupt: signal.Handlers = signal.SIG_DFL, **more: str
) -> tuple[dict[str, Any], int]:
    """What a worker found itself to be that Ray starts so, and the process that Ray started."""
    script, out = tmp_path / become.WORKER, tmp_path / "found.json"
    script.write_text(WORKER)
    out.unlink(missing_ok=True)
    environment = {**ENVIRONMENT, "RAY_NODE": "7", **more}
    if folder is not None:
        environment[become.FOLDER_VARIABLE] = str(folder)

    def begin_as_rays_child() -> None:
        signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1])

    with (tmp_path / "output").open("w") as output, (tmp_path / "errors").open("w") as errors:
        started = subprocess.Popen(
            [sys.executable, become.__file__, "--language=PYTHON", str(script), str(out), "--two words"],
            env=environment, cwd=tmp_path, stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True,
            preexec_fn=begin_as_rays_child,
        )  # fmt: skip
    started.communicate("what it was given", timeout=patience_s())
    wait_until(out.exists, "the worker has begun")
    wait_until(lambda: (tmp_path / "output").read_text() == "to the output\n", "the output is the asker's")
    assert (tmp_path / "errors").read_text() == "to the errors\n"
    found: dict[str, Any] = json.loads(out.read_text())
    return found, started.pid


@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN], ids=["in front", "in the background"])
def test_a_copy_finds_what_a_process_of_its_own_would(tmp_path: Path, folder: Path, interrupt: signal.Handlers) -> None:
    judge, started = began(tmp_path, None, interrupt)
    assert judge["pid"] == started, "it became the worker"
    copy, asker = began(tmp_path, folder, interrupt)
    assert copy["pid"] != asker
    assert {name: copy[name] for name in copy if name not in OF_ONE_PROCESS} == {
        name: judge[name] for name in judge if name not in OF_ONE_PROCESS
    }
    assert copy["argv"] == judge["argv"] == [str(tmp_path / become.WORKER), str(tmp_path / "found.json"), "--two words"]
    del copy["environment"][become.FOLDER_VARIABLE]
    assert copy["environment"] == judge["environment"]
    assert "fractions" in copy["modules"]
    assert "fractions" not in judge["modules"]
    assert not {"wave", "colorsys"} & set(copy["modules"])


def test_a_worker_that_computes_has_more(tmp_path: Path, folder: Path) -> None:
    copy, _ = began(tmp_path, folder, **HAS_TORCH, OMP_NUM_THREADS="3")
    assert {"fractions", "wave"} <= set(copy["modules"])
    assert copy["environment"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("kind", [{}, HAS_TORCH], ids=["host", "device"])
def test_rays_own_are_those_of_one_environment(tmp_path: Path, folder: Path, kind: dict[str, str]) -> None:
    first, _ = began(tmp_path, folder, **kind)
    assert "colorsys" not in first["modules"], "Ray is not imported before its variables are known"
    second, asker = began(tmp_path, folder, **kind)
    assert {"fractions", "colorsys"} <= set(second["modules"])
    assert ("wave" in second["modules"]) is bool(kind)
    assert second["pid"] != asker
    assert second["environment"] == first["environment"]
    other, _ = began(tmp_path, folder, RAY_NODE="8", **kind)
    assert "colorsys" not in other["modules"]
    assert "fractions" in other["modules"], "what does not depend on Ray's variables is there all the same"


@pytest.mark.parametrize("folder", ["not apart"], indirect=True)
def test_nobody_is_a_copy_whose_ids_were_those_of_others(tmp_path: Path, folder: Path) -> None:
    for _ in range(3):
        copy, asker = began(tmp_path, folder)
        assert copy["pid"] != asker
        assert "fractions" in copy["modules"]
        assert "colorsys" not in copy["modules"]


def test_they_may_be_announced(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = began(tmp_path, tmp_path / "none")
    monkeypatch.setenv(become.FOLDER_VARIABLE, str(folder))
    variables = {**plain["environment"], become.FOLDER_VARIABLE: str(folder)}
    announce(become.HOST, variables)
    announce(become.DEVICE, variables | {"RAY_OF_DEVICES": "1"})
    first, _ = began(tmp_path, folder)
    assert "colorsys" in first["modules"]
    second, _ = began(tmp_path, folder, RAY_OF_DEVICES="1", **HAS_TORCH)
    assert {"colorsys", "wave"} <= set(second["modules"])
    announce(become.HOST, variables)  # once more, which begins nothing
    again, _ = began(tmp_path, folder)
    assert "colorsys" in again["modules"]


def test_nobody_hears_an_announcement_where_no_template_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(become.FOLDER_VARIABLE, str(tmp_path / "none"))
    announce(become.HOST, {})
    monkeypatch.delenv(become.FOLDER_VARIABLE)
    announce(become.HOST, {})


def test_an_end_does_not_wait_for_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("import pathlib, time; pathlib.Path('begun').touch(); time.sleep(3600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.chdir(tmp_path)
    with running():
        folder = Path(os.environ[become.FOLDER_VARIABLE])
        assert {path.name for path in folder.iterdir()} == set(KINDS), "all are heard before the templates run"
        wait_until((tmp_path / "begun").exists, "the template imports")
    assert not folder.exists()
    assert become.FOLDER_VARIABLE not in os.environ


def test_a_path_too_long_for_a_socket_leaves_workers_to_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    def fail_within() -> None:
        with running():
            assert become.FOLDER_VARIABLE not in os.environ
            assert not list(long.iterdir()), "nothing is left behind"
            raise LookupError

    with pytest.raises(LookupError) as caught:
        fail_within()
    assert caught.value.__context__ is None, "what fails within is told by itself"


def test_what_is_imported_may_depend_on_the_environment(tmp_path: Path, folder: Path) -> None:
    other, started = began(tmp_path, folder, HF_HOME="/elsewhere")
    assert other["pid"] == started, "it began by itself"
    assert other["environment"]["HF_HOME"] == "/elsewhere"


def test_without_a_template_it_begins_by_itself(tmp_path: Path) -> None:
    other, started = began(tmp_path, tmp_path / "none")
    assert other["pid"] == started


@pytest.mark.parametrize(
    ("others", "may", "may_of_ray"),
    [
        ({"A": "1"}, True, True),
        ({"A": "1", "OMP_NUM_THREADS": "2", "SPT_NOENV": "1", **HAS_TORCH}, True, True),
        ({"A": "1", "RAY_JOB_ID": "2"}, True, False),
        ({"A": "1", "CUDA_VISIBLE_DEVICES": "2"}, True, False),
        ({"A": "2"}, False, False),
        ({}, False, False),
        ({"A": "1", "LD_PRELOAD": "x.so"}, False, False),
    ],
)
def test_who_may_be_copied(others: dict[str, str], may: bool, may_of_ray: bool) -> None:
    assert may_be_copied({"A": "1"}, others, has_ray=False) is may
    assert may_be_copied({"A": "1"}, others, has_ray=True) is may_of_ray


def printed(code: str) -> list[str]:
    """The words that a new Python prints."""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_copy_that_has_serve_is_told_of_its_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve reads its name where it is imported; where it does not any more, such a process is no copy."""
    name = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    own, others = {"A": "1"}, {"A": "1", name: "module:prepare"}
    serve = ModuleType("ray.serve._private.http_util")
    monkeypatch.setitem(sys.modules, serve.__name__, serve)
    assert not may_be_copied(own, others, has_ray=True)
    vars(serve)[name] = None
    assert may_be_copied(own, others, has_ray=True)
    assert not may_be_copied(own, {**others, "RAY_SERVE_OTHER": "1"}, has_ray=True)
    monkeypatch.setenv(name, "module:prepare")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    worker_template._begin_libraries()
    assert vars(serve)[name] == "module:prepare"


def test_serve_reads_its_hook_where_copies_tell_it() -> None:
    from ray.serve._private import http_util

    assert hasattr(http_util, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH")


def test_templates_have_what_they_name_and_neither_ray_nor_a_device() -> None:
    assert set(HAS_TORCH.values()) == {become.DEVICE}
    begin = "import sys; from app.cli import worker_template as template"
    host = printed(f"{begin}; template._import({HOST_MODULES}); print(*sys.modules)")
    assert {name for name in HOST_MODULES if name.startswith("app.")} <= set(host)
    assert not {"ray", "torch"} & set(host)
    then = "print(torch.cuda.is_initialized(), *sys.modules)"
    device = printed(f"{begin}; import torch; template._import({DEVICE_MODULES}); {then}")
    assert device[0] == "False"
    assert set(DEVICE_MODULES) <= set(device)
    assert "ray" not in device


def test_copies_draw_random_numbers_of_their_own() -> None:
    code = """
import os
from app.cli import worker_template as template
template._import(template.HOST_MODULES)
for _ in range(2):
    if template._fork():
        template._begin_libraries()
        import random, uuid
        import numpy
        print(random.random(), uuid.uuid4(), numpy.random.rand(), flush=True)
        os._exit(0)
    os.wait()
"""
    words = printed(code)
    assert len(words) == len(set(words)) == 6


def test_a_copy_whose_asker_has_gone_ends() -> None:
    code = (
        "import socket; from app.cli.worker_template import _answer; a, b = socket.socketpair(); b.close(); _answer(a)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('on')"], env=ENVIRONMENT, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


@pytest.mark.parametrize(("value", "threads"), [("3", "3"), ("2,4", "2"), ("many", "5"), ("0", "5"), ("", "5")])
def test_threads_are_those_that_openmp_would_have(value: str, threads: str) -> None:
    code = f"""
import os, sys, types
from app.cli import worker_template as template
sys.modules["torch"] = torch = types.ModuleType("torch")
set_to = [5]
torch.set_num_threads = set_to.append
os.environ["OMP_NUM_THREADS"] = {value!r}
template._begin_libraries()
print(set_to[-1])
"""
    assert printed(code) == [threads]
