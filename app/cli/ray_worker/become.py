"""Becomes a worker process of Ray, as Ray's own `setup_worker.py` does, but without importing Ray for it.

Ray runs this for each worker process, with the environment that this shall have and what to become. Its own script
imports Ray, most of a second, only to read that; the worker that it becomes imports Ray again. Between the start of a
server and its first answer four processes begin one after another. Where a process runs that has done their imports, a
copy of it becomes the worker. What is no ordinary worker is left to Ray's script.

Run as a file, whose directory Python puts first on its path: nothing else lies in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

FOLDER_VARIABLE = "MANTA_WORKER_TEMPLATE"  # the folder of the templates' sockets
KIND_VARIABLE = "MANTA_WORKER_KIND"
HOST, DEVICE = "host", "device"  # the templates: what a worker may be a copy of
WITH_RAY = "-ray"  # at the end of the name of one that has imported Ray, too, and is asked first
WORKER = "default_worker.py"
RAYS_OWN = ("_private", "workers", "setup_worker.py")
_KNOWN = {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint", "java_jars"}


def become(argv: Sequence[str]) -> None:
    """Does not return: the process becomes the worker, or Ray's own script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    given, command = parser.parse_known_args(argv)
    context = json.loads(given.serialized_runtime_env_context or "{}")
    if given.language == "PYTHON" and is_ordinary(context):
        set_environment(context.get("env_vars") or {})
        program = context.get("py_executable") or sys.executable
        kind = os.environ.get(KIND_VARIABLE, HOST)
        if program == sys.executable and any(is_copied(command, name) for name in (kind + WITH_RAY, kind)):
            sys.exit()
        os.execv(program, [program, *command])
    os.execv(sys.executable, [sys.executable, rays_own(), *argv])


def is_ordinary(context: dict[str, Any]) -> bool:
    """True if the context has nothing but an environment, and at most another Python."""
    more = context.get("command_prefix") or context.get("override_worker_entrypoint")
    program = context.get("py_executable") or sys.executable
    return sys.platform == "linux" and not more and context.keys() <= _KNOWN and os.access(program, os.X_OK)


def set_environment(variables: dict[str, str]) -> None:
    """Set them as Ray does: ${NAME} stands for what the environment has, or for nothing."""
    for name, value in variables.items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))


def is_copied(command: Sequence[str], kind: str) -> bool:
    """True if a template (app/cli/worker_template.py) has made a copy of itself into what this process shall be, with
    the files, limits and signals of this one; False where there is none, or it refuses."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or os.path.basename(command[0]) != WORKER:
        return False
    with open("/proc/self/oom_score_adj") as file:
        score = file.read()
    question = {
        "argv": command,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "limits": [(number, resource.getrlimit(number)) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "oom_score_adj": score,
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "ignores_interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,  # as of a server in the background
    }
    data = json.dumps(question).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as template:
            template.connect(os.path.join(folder, kind))
            sent = socket.send_fds(template, [data], [0, 1, 2])
            template.sendall(data[sent:])
            template.shutdown(socket.SHUT_WR)
            return template.recv(1) == b"+"
    except OSError:
        return False


def rays_own() -> str:
    """The path of Ray's script."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None, "Ray runs this"
    assert spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), *RAYS_OWN)


if __name__ == "__main__":
    become(sys.argv[1:])
