"""`python -m app.cli.worker_template FOLDER FILES`: a process that has imported what Ray's worker processes here need,
and becomes a copy of itself for each of them, which takes 0.02 s in place of seconds.

`host` has what routers, ingresses and replicas need, and `device` torch and what computes on it as well. In the
environment of copies only such variables may differ that nothing imported has read. What Ray imports depends on its
variables, too: so each of the two has a copy that waits until they are announced, or for the first who asks, and has
Ray and Serve from then on (`ray_ids.py` says what such a copy must not have done). Who is refused asks the one without,
and begins by itself in the end, as each does where no template runs.

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from app.cli import ray_ids
from app.cli.ray_worker.become import DEVICE, FOLDER_VARIABLE, HOST, KIND_VARIABLE, WITH_RAY
from app.heap import uncollected
from app.kernels import compile_processes

# What deployments import, by themselves or by way of Ray Serve. What is not installed is left out.
HOST_MODULES = (
    *("aiohttp", "fastapi", "filelock", "google.protobuf.json_format", "grpc.aio", "jinja2", "jsonschema", "pandas"),
    *("opentelemetry.exporter.prometheus", "opentelemetry.sdk.metrics", "prometheus_client", "requests", "uvloop"),
    *("yaml", "app.api.admin.app", "app.api.server.app", "app.engine.async_engine", "app.media.reader"),
)
DEVICE_MODULES = ("app.worker.worker",)
RAY_MODULES = (
    *("ray.serve._private.controller", "ray.serve._private.replica", "app.deployments.app"),
    "app.engine.executor.worker_group.worker_actor",
)

KINDS = tuple(kind + ray for kind in (HOST, DEVICE) for ray in ("", WITH_RAY))
_MOST_BYTES = 1 << 20
_MOST_WAITING = 128
# Nothing that was imported has read these, or `_take_on` sees to them; nor, but for Ray itself, the next.
_MAY_DIFFER = {KIND_VARIABLE, "OMP_NUM_THREADS", "SPT_NOENV"}
_RAY_READS, _RAYS = "CUDA_VISIBLE_DEVICES", "RAY_"
# An ingress has it, and no other process. What reads it where it is imported is told once more in a copy.
_HOOK, _HOOK_READER = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "ray.serve._private.http_util"


@contextmanager
def running() -> Iterator[None]:
    """Within, workers of a cluster that this process starts are copies, once there is what to copy. On Linux only."""
    if sys.platform != "linux":
        yield
        return
    folder = tempfile.mkdtemp(prefix="manta-template-")
    process = None
    with suppress(OSError):  # the path is too long for a socket, or no process is to be had
        process = _begun(folder)
    if process is None:  # each worker begins by itself
        shutil.rmtree(folder, ignore_errors=True)
        yield
        return
    os.environ[FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        os.environ.pop(FOLDER_VARIABLE, None)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # in the midst of imports, too; a copy has a group of its own
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def _begun(folder: str) -> subprocess.Popen[bytes]:
    """Templates that begin. Who asks or announces is heard from here on."""
    with ExitStack() as ours:
        files = [ours.enter_context(_listener(Path(folder) / kind)).fileno() for kind in KINDS]
        command = [sys.executable, "-m", "app.cli.worker_template", folder, *map(str, files)]
        environment = {**os.environ, FOLDER_VARIABLE: folder}
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=files, env=environment)


def announce(kind: str, variables: Mapping[str, str]) -> None:
    """Tell the template of this kind that shall have Ray the environment of those who will ask, before the first of
    them does."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as template:
        template.connect(os.path.join(folder, kind + WITH_RAY))
        template.sendall(json.dumps({"environment": dict(variables)}).encode())


def main(folder: Path, files: Sequence[int]) -> None:
    """Serve by these sockets, one for each of KINDS, until the end of the input, or in a copy do what the copy is
    for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a copy
    listeners = {kind: socket.socket(fileno=file) for kind, file in zip(KINDS, files, strict=True)}
    _import(HOST_MODULES)
    has_device = _fork()
    if has_device:
        _import(DEVICE_MODULES)
        compile_processes.prepare()
    has_ray = _fork()
    listener = listeners.pop((DEVICE if has_device else HOST) + (WITH_RAY if has_ray else ""))
    for other in listeners.values():
        other.close()
    copied = None
    if not has_ray or _import_ray(listener):
        gc.collect()
        gc.freeze()  # what all copies share, and none looks at again
        copied = serve(listener, has_ray)
    if copied is not None:
        if has_device:
            compile_processes.begin()
        _take_on(*copied)
    elif not has_device and not has_ray:
        shutil.rmtree(folder, ignore_errors=True)


def _import_ray(listener: socket.socket) -> bool:
    """Take the environment of the first who asks or announces it, and import what depends on that. False at the end of
    the input, and where a copy would not draw ids of its own: who asks is then refused at once."""
    if (asked := _next(listener)) is None:
        return False
    asker, question, files = asked
    _close(asker, files)
    _set_environment(question["environment"])
    with ray_ids.undrawn():
        _import(RAY_MODULES)
    if ray_ids.are_apart():
        return True
    listener.close()
    return False


def serve(listener: socket.socket, has_ray: bool) -> tuple[dict[str, Any], Sequence[int]] | None:
    """Fork for each who asks and may be copied: in the copy the question and its files, and None at the end of the
    input."""
    while (asked := _next(listener)) is not None:
        asker, question, files = asked
        with suppress(OSError):  # of the fork: no copy
            if "argv" in question and may_be_copied(os.environ, question["environment"], has_ray) and _fork():
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


def may_be_copied(own: Mapping[str, str], others: Mapping[str, str], has_ray: bool) -> bool:
    """True if a process with the other environment would have imported the same."""
    names = {name for name in own.keys() | others.keys() if own.get(name) != others.get(name)} - _MAY_DIFFER
    if has_ray:
        return not names - ({_HOOK} if _reads_hook() else set())
    return all(name == _RAY_READS or name.startswith(_RAYS) for name in names)


def _reads_hook() -> bool:
    """True if Serve is here and keeps the hook where it can be set."""
    return hasattr(sys.modules.get(_HOOK_READER), _HOOK)


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
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
    if _reads_hook():
        setattr(sys.modules[_HOOK_READER], _HOOK, os.environ.get(_HOOK))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(file) for file in sys.argv[2:]])
