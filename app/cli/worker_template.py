"""`python -m app.cli.worker_template FOLDER`: a process that has imported what Ray's worker processes here import, and
becomes a copy of itself for each of them, which takes 0.02 s in place of seconds.

There are two: `host` has what routers, ingresses and replicas need, and `device` torch and what computes on it as well.
Neither has Ray: `ray.serve` draws random ids where it is imported, and copies of a process that has drawn one all draw
the same ones from then on: those of placement groups, tasks and objects. In the environment of copies only such
variables may differ that nothing imported has read. Who is refused begins by itself, and so does each where no template
runs.

`ray_worker/become.py` asks, by a socket in FOLDER, which only this user can enter. All templates end with the process
that started them: it holds the other end of their input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.cli.ray_worker.become import DEVICE, FOLDER_VARIABLE, HOST, KIND_VARIABLE
from app.heap import uncollected
from app.kernels import compile_processes

# What deployments import, by themselves or by way of Ray Serve. What is not installed is left out.
HOST_MODULES = (
    *("aiohttp", "fastapi", "filelock", "google.protobuf.json_format", "grpc.aio", "jinja2", "jsonschema", "pandas"),
    *("opentelemetry.exporter.prometheus", "opentelemetry.sdk.metrics", "prometheus_client", "requests", "uvloop"),
    *("yaml", "app.api.admin.app", "app.api.server.app", "app.engine.async_engine", "app.media.reader"),
)
DEVICE_MODULES = ("app.worker.worker",)

_MOST_BYTES = 1 << 20
_MOST_WAITING = 128
# Nothing that was imported has read these, or `_take_on` sees to them; nor any of Ray's.
_MAY_DIFFER = {KIND_VARIABLE, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SPT_NOENV"}
_RAYS = "RAY_"


@contextmanager
def running() -> Iterator[None]:
    """Within, workers of a cluster that this process starts are copies, once there is what to copy. On Linux only."""
    if sys.platform != "linux":
        yield
        return
    folder = os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="manta-template-")
    command = [sys.executable, "-m", "app.cli.worker_template", folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main(folder: Path) -> None:
    """Serve until the end of the input, or in a copy do what the copy is for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a copy
    listeners = {kind: _listener(folder / kind) for kind in (HOST, DEVICE)}
    _import(HOST_MODULES)
    kind = DEVICE if _fork() else HOST
    listener = listeners.pop(kind)
    for other in listeners.values():
        other.close()
    if kind == DEVICE:
        _import(DEVICE_MODULES)
        compile_processes.prepare()
    gc.collect()
    gc.freeze()  # what all copies share, and none looks at again
    if (copied := serve(listener)) is not None:
        if kind == DEVICE:
            compile_processes.begin()
        _take_on(*copied)
    elif kind == HOST:
        shutil.rmtree(folder, ignore_errors=True)


def serve(listener: socket.socket) -> tuple[dict[str, Any], Sequence[int]] | None:
    """Fork for each who asks and may be copied: in the copy the question and its files, and None at the end of the
    input."""
    while (asked := _next(listener)) is not None:
        asker, question, files = asked
        with suppress(OSError):  # of the fork: no copy
            if may_be_copied(os.environ, question["environment"]) and _fork():
                listener.close()
                _answer(asker)
                return question, files
        _close(asker, files)
    listener.close()
    return None


def _answer(asker: socket.socket) -> None:
    """Let this process, a copy, be the asker's in its place; it ends where the asker has gone."""
    try:
        os.setpgid(0, 0)  # Ray ends all of a worker's group with it
        asker.sendall(b"+")
        asker.close()
    except OSError:
        os._exit(1)


def may_be_copied(own: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """True if a process with the other environment would have imported the same."""
    names = {name for name in own.keys() | others.keys() if own.get(name) != others.get(name)}
    return all(name in _MAY_DIFFER or name.startswith(_RAYS) for name in names)


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_MOST_WAITING)
    return listener


def _import(names: Sequence[str]) -> None:
    with uncollected():
        for name in names:
            with suppress(ImportError):
                importlib.import_module(name)


def _fork() -> bool:
    """True in the copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: libraries' own, which they begin anew
        return os.fork() == 0


def _next(listener: socket.socket) -> tuple[socket.socket, dict[str, Any], Sequence[int]] | None:
    """The next who asks, with its question and the files that came with it; None at the end of the input."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:
            return None
        asker, _ = listener.accept()
        files: Sequence[int] = ()
        try:
            data, files, _, _ = socket.recv_fds(asker, 1 << 16, 3)
            while (chunk := asker.recv(1 << 16)) and len(data) < _MOST_BYTES:
                data += chunk
            return asker, json.loads(data), files
        except (OSError, ValueError):  # it has gone
            _close(asker, files)


def _close(asker: socket.socket, files: Sequence[int]) -> None:
    asker.close()
    for file in files:
        os.close(file)


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _take_on(question: dict[str, Any], files: Sequence[int]) -> None:
    """Run the asker's script as Python would, with the files, environment, limits and signals that the asker has."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    _set_environment(question["environment"])
    os.chdir(question["directory"])
    for number, limits in question["limits"]:
        resource.setrlimit(number, limits)
    if (score := Path("/proc/self/oom_score_adj")).read_text() != question["oom_score_adj"]:
        score.write_text(question["oom_score_adj"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not question["ignores_interrupts"]:  # as a template does
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, question["blocked_signals"])
    _begin_libraries()
    sys.argv = question["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def _begin_libraries() -> None:
    """Do what libraries do once where they are imported, and copies must not share. Python's `random` and OpenSSL see
    to it themselves; PyTorch begins with the same seed in every process."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # behind it: those of regions within
    if (torch := sys.modules.get("torch")) is not None and threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))  # NumPy's own products keep as many as the template has


if __name__ == "__main__":
    main(Path(sys.argv[1]))
