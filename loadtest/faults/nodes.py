"""A Ray cluster of several nodes on this machine, each with its own raylet, for a deployment to join.

The nodes are started by `ray start` and live on by themselves, so that nothing of Ray's watches over what is killed
here. The first one holds the GCS and takes requests; with Redis the GCS keeps its tables there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from app.engine.executor import own_ray
from benchmarks.serve_process import ServeProcess, free_port
from loadtest.faults.relay import HERE, THERE, enter_new_network
from loadtest.faults.shapes import Shape

_LIMIT_S = 400.0  # of a command
_PASSWORD = "only-this-machine-s"


class RayNodes:
    """Nothing, where the shape has no nodes of its own."""

    def __init__(self, tmp: Path, shape: Shape) -> None:
        self._tmp = tmp
        self._shape = shape
        self._port = free_port()
        self._host = HERE if shape.has_link else "127.0.0.1"
        self._relay: subprocess.Popen[str] | None = None
        self._redis: subprocess.Popen[bytes] | None = None
        self._environ: dict[str, str] = {}
        self.lost: list[tuple[list[str], dict[str, str]]] = []  # commands, environments

    def start(self, server: ServeProcess) -> None:
        """Start the head, then the others, and let the deployment join them."""
        if not self._shape.num_nodes:
            return
        self._environ = {**os.environ, **own_ray.SETTINGS, **server.environ, "RAY_AUTH_MODE": "token"}
        self._environ["RAY_TMPDIR"] = f"{self._tmp}/ray"
        self._environ.pop("RAY_ADDRESS", None)
        if self._shape.redis:
            self._environ["RAY_REDIS_ADDRESS"] = self._start_redis()
        if self._shape.has_link:
            self._start_relay()
        for number in range(self._shape.num_nodes):
            self._start_node(number)
        server.environ |= {"RAY_ADDRESS": self._address, "RAY_AUTH_MODE": "token"}

    @property
    def _address(self) -> str:
        return f"{self._host}:{self._port}"

    def set_link(self, link: dict[str, Any]) -> None:
        """How bad the link between the nodes is from now on: the fields of relay.Link."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(json.dumps(link) + "\n")
        self._relay.stdin.flush()

    def add(self) -> None:
        """A further node, as large as the others."""
        self._start_node(1)

    def stop(self) -> None:
        """End all of it."""
        processes = self.processes()
        services = [service for service in (self._redis, self._relay) if service is not None]
        processes += [psutil.Process(service.pid) for service in services if service.poll() is None]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        for service in services:
            service.wait()

    def processes(self) -> list[psutil.Process]:
        """Every process of every node: those that name our directory, and what they started."""
        if not self._shape.num_nodes:
            return []
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and any(str(self._tmp) in argument for argument in process.cmdline()):
                    for one in (process, *process.children(recursive=True)):
                        found[one.pid] = one
        return list(found.values())

    def kill_gcs(self) -> None:
        """SIGKILL; `revive_gcs` starts it again as it was."""
        for process in self.processes():
            if "/gcs/gcs_server" in " ".join(process.cmdline()[:1]):
                self.lost.append((process.cmdline(), process.environ()))
                process.kill()

    def revive_gcs(self) -> None:
        """The GCS that was killed, with the arguments that it had."""
        for command, environ in self.lost:
            log = (self._tmp / "gcs.log").open("ab")
            subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        self.lost.clear()

    def others(self) -> list[str]:
        """Ids of the nodes beside the head that are there."""
        return self._ray("-c", _OTHER_NODES.format(address=self._address)).strip().splitlines()[-1].split()

    def drain(self, node: str, deadline_s: int) -> None:
        """Announce the end of a node as a cloud does that takes it back, and wait until no replica is on it.

        RuntimeError says why it did not.
        """
        self._ray(
            "-m", "app.cli", "drain", "--address", self._address, "--node-id", node, "--deadline-s", str(deadline_s)
        )

    def _start_node(self, number: int) -> None:
        place = ["--head", f"--port={self._port}", f"--dashboard-port={free_port()}", f"--temp-dir={self._tmp}/ray"]
        host, within = self._host, list[str]()
        if number:
            place = [f"--address={self._address}"]
        if number and self._relay is not None:
            host, within = THERE, ["nsenter", f"--net=/proc/{self._relay.pid}/ns/net"]
        if self._redis is not None:
            place.append(f"--redis-password={_PASSWORD}")
        shared = [f"--node-ip-address={host}", "--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
        size = [f"--num-cpus={self._shape.node_cpus}", "--object-store-memory=200000000"]
        self._ray("-m", "ray.scripts.scripts", "start", *place, *shared, *size, within=within)

    def _ray(self, *arguments: str, within: Sequence[str] = ()) -> str:
        done = subprocess.run(
            [*within, sys.executable, *arguments], env=self._environ, capture_output=True, text=True, timeout=_LIMIT_S
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments[1:])} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def _start_redis(self) -> str:
        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", _PASSWORD]
        with (self._tmp / "redis.log").open("wb") as log:
            self._redis = subprocess.Popen(command, cwd=self._tmp, stdout=log, stderr=log, start_new_session=True)
        time.sleep(0.5)
        return f"127.0.0.1:{port}"

    def _start_relay(self) -> None:
        command = [sys.executable, "-m", "loadtest.faults.relay"]
        pipe = subprocess.PIPE
        self._relay = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "up\n":
            raise RuntimeError("the link between the nodes does not come up")


def enter_own_network() -> None:
    """Where it is allowed: a network that nobody else is in and nothing leaves, so that no port is taken."""
    if os.geteuid() == 0:
        enter_new_network()


def no_network() -> str:
    """Why there can be no link here; empty when there can."""
    if os.geteuid():
        return "network namespaces need root"
    return "" if os.access("/dev/net/tun", os.W_OK) else "there is no /dev/net/tun"


def no_redis() -> str:
    """Why there is no Redis here; empty when there is."""
    return "" if shutil.which("redis-server") else "no redis-server is installed"


_OTHER_NODES = """
import ray
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
head = ray.get_runtime_context().get_node_id()
print(*[node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != head])
"""
