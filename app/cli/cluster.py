"""The Ray cluster that a server would join instead of starting one: where it is, what it has, and its token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.cli.command import CommandError

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 60.0
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True, slots=True)
class RunningServe:
    """The one Serve of a cluster: its HTTP port, and the applications it has."""

    port: int
    applications: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that answered. Resources are those of all nodes together."""

    address: str
    cpus: float
    gpus: float
    serve: RunningServe | None


def cluster_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns what RAY_ADDRESS or a `ray start` on this machine names; None when a cluster of its own is to be started.

    A cluster that a `ray start` left a note of, and that is no longer there, is passed over with a line on stderr: Ray
    would try to reach it for a minute.
    """
    given = environ.get("RAY_ADDRESS")
    if given:
        return None if given == "local" else given
    note = Path(environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if not note.is_file():
        return None
    address = note.read_text(encoding="utf-8").strip()
    reason = _unreachable(address)
    if reason is None:
        return address
    print(
        f"manta: {note} names a Ray cluster at {address}, where none answers ({reason}): a new one is started; "
        "`ray stop` removes the note",
        file=sys.stderr,
    )
    return None


def auth_mode(environ: Mapping[str, str] = os.environ) -> str | None:
    """RAY_AUTH_MODE for joining a cluster: `token` where there is one to show, which an open cluster takes too."""
    given = environ.get("RAY_AUTH_MODE")
    return given if given is not None or not _has_token(environ) else "token"


def probe(address: str, environ: Mapping[str, str] = os.environ) -> Cluster:
    """Ask the cluster. CommandError names in one line why it cannot be joined, and the remedy."""
    reason = None if "://" in address else _unreachable(address)
    if reason is not None:
        raise _gone(address, reason)
    mode = auth_mode(environ)
    child_environ = {**environ, **({"RAY_AUTH_MODE": mode} if mode else {})}
    child_environ.pop("RAY_ADDRESS", None)
    answer = _ask(address, child_environ)
    if answer.get("kind") == "token":
        raise _token_error(address, environ)
    if "error" in answer:
        raise _gone(address, answer["error"])
    serve = answer["serve"]
    running = RunningServe(serve["port"], tuple(serve["applications"])) if serve else None
    return Cluster(answer["address"], answer["cpus"], answer["gpus"], running)


def _ask(address: str, environ: Mapping[str, str]) -> dict[str, Any]:
    root = str(Path(__file__).resolve().parents[2])
    environ = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "app.cli.cluster_probe", address]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"kind": "gone", "error": f"no answer within {PROBE_TIMEOUT_S:.0f} s"}
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"kind": "gone", "error": lines[-1]}


def _unreachable(address: str) -> str | None:
    """Why nothing listens there; None where something does, or where the address is no host and port (`auto`)."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return None
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _has_token(environ: Mapping[str, str]) -> bool:
    home = Path(environ.get("HOME") or Path.home())
    return any(environ.get(name) for name in TOKEN_VARIABLES) or (home / ".ray" / "auth_token").is_file()


def _token_error(address: str, environ: Mapping[str, str]) -> CommandError:
    start = f"the Ray cluster at {address} asks for a token"
    if environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return CommandError(f"{start}, and RAY_AUTH_MODE={environ['RAY_AUTH_MODE']} shows none: unset RAY_AUTH_MODE")
    remedy = "put what `ray get-auth-token` prints on its head node into ~/.ray/auth_token, or RAY_AUTH_TOKEN"
    have = "this machine's is another" if _has_token(environ) else "this machine has none"
    return CommandError(f"{start}, and {have}: {remedy}")


def _gone(address: str, reason: str) -> CommandError:
    return CommandError(
        f"no Ray cluster answers at {address} ({reason}): start one with `ray start --head`, or unset RAY_ADDRESS"
    )
