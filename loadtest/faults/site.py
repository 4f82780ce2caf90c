"""The deployment that a run strikes: its processes by their part, its replicas, and whether it is whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serve_process import ServeProcess
from loadtest.faults.nodes import RayNodes
from loadtest.faults.shapes import Shape
from loadtest.server import authorization

# Patterns in the title or command line of a process.
PARTS = {
    "engine": "ServeReplica:manta:Engine-",
    "worker": "ray::WorkerActor",
    "ingress": "ServeReplica:manta:Ingress",
    "router": "ServeReplica:manta:Router",
    "controller": "ray::ServeController",
    "haproxy": "/bin/haproxy ",
    "haproxy_manager": "ray::HAProxyManager",
    "gcs": "/gcs/gcs_server ",
    "raylet": "/raylet/raylet ",
}
_ANSWER_S = 3.0


class Site:
    """`with Site(shape) as site:` serves at `site.base_url`. `notes` is for strikes that heal something later."""

    def __init__(self, shape: Shape, ready_timeout_s: float = 240.0) -> None:
        self.shape = shape
        self._server = ServeProcess(shape.config, shape.edit, ready_timeout_s, shape.module, ends_gracefully=False)
        self.tmp: Path = self._server.tmp
        self._server.environ |= {name: value.format(tmp=self.tmp) for name, value in shape.environ.items()}
        self.base_url = self._server.base_url
        self.nodes = RayNodes(self.tmp, shape)
        self.deploy = self._server.deploy
        self.notes: dict[str, Any] = {}
        self._parts: dict[str, list[psutil.Process]] = {}
        self._seen: dict[int, psutil.Process] = {}
        self._full: dict[str, int] = {}  # how many processes each part has
        self._num_channels = 0.0

    def __enter__(self) -> Site:
        try:
            if self.shape.library is not None:
                command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(self.tmp / "library.so"), str(self.shape.library)]
                subprocess.run(command, check=True)
            self.nodes.start(self._server)
            self._server.__enter__()
            self._wait(self._is_settled, 60.0)
            self._num_channels = self._full["ingress"] * self._full["engine"]
            self._wait(self.is_whole, 60.0)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes()
        self._server.__exit__(kind, error, trace)
        self.nodes.stop()
        for process in self._seen.values():  # those too that lost their parent
            with contextlib.suppress(psutil.Error):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """All of the deployment and of its Ray cluster."""
        found = {process.pid: process for process in [*self._server.processes(), *self.nodes.processes()]}
        self._seen.update(found)
        return list(found.values())

    def look(self) -> None:
        """Find the processes of each part, which takes a while; `part` tells them at once."""
        parts: dict[str, list[psutil.Process]] = {name: [] for name in PARTS}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline()) + " "
                for name, text in PARTS.items():
                    if text in line and process.status() != psutil.STATUS_ZOMBIE:
                        parts[name].append(process)
        self._parts = parts

    def part(self, name: str) -> list[psutil.Process]:
        """The processes of one part that were there at the last look and still are, in the order of their start."""
        return sorted((p for p in self._parts[name] if p.is_running()), key=lambda process: process.pid)

    def counts(self) -> dict[str, int]:
        """How many processes of each part can run, by a look at them."""
        self.look()
        return {name: sum(map(_can_run, processes)) for name, processes in self._parts.items()}

    def missing(self) -> list[str]:
        """What the deployment lacks of what it had; empty when it is whole."""
        counts = self.counts()
        lacking = [f"{part} {counts[part]} of {full}" for part, full in self._full.items() if counts[part] < full]
        if not lacking and (status := self._server.health()) != 200:
            lacking.append(f"/health is {status}")
        if not lacking and (found := self.metric("manta:ingress_channels")) != self._num_channels:
            lacking.append(f"channels {found:.0f} of {self._num_channels:.0f}")
        return lacking

    def is_whole(self) -> bool:
        """Whether every part is there again, and every ingress reaches every engine."""
        return not self.missing()

    def _is_settled(self) -> bool:
        """Whether every part is there, and as often as at the last look: what it is from now on to have."""
        before, self._full = self._full, self.counts()
        replicas, workers = self.shape.num_replicas, self.shape.num_workers
        least = dict.fromkeys(PARTS, 1) | {"engine": replicas, "ingress": replicas, "worker": workers}
        return before == self._full and all(self._full[part] >= count for part, count in least.items())

    def surplus(self) -> list[str]:
        """Parts of which more processes are there than belong."""
        counts = self.counts()
        return [f"{part} {counts[part]} of {full}" for part, full in self._full.items() if counts[part] > full]

    def metric(self, name: str) -> float:
        """The sum of a metric over all replicas; -1 when nothing answers."""
        return sum(self.metrics(name).values()) if self.metrics(name) else -1.0

    def metrics(self, name: str) -> dict[str, float]:
        """A metric by its labels; empty when nothing answers."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=_ANSWER_S) as answer:
                text = answer.read().decode()
        except (OSError, ValueError):
            return {}
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {json.dumps(sample.labels): sample.value for sample in samples if sample.name == name}

    def replicas(self) -> set[str]:
        """Ids of the engine replicas that run, by Serve's own account; empty when it does not answer."""
        request = urllib.request.Request(f"{self._server.dashboard()}/api/serve/applications/", headers=_ray_token())
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                applications = json.load(answer)["applications"]
        except (OSError, ValueError, LookupError):
            return set()
        deployments = applications["manta"]["deployments"]
        engines = [deployment for name, deployment in deployments.items() if name.startswith("Engine-")]
        return {r["replica_id"] for engine in engines for r in engine["replicas"] if r["state"] == "RUNNING"}

    def log(self) -> str:
        """What the server printed."""
        return self._server.log()

    async def until(self, condition: Callable[[], Any], limit_s: float, every_s: float = 0.25) -> bool:
        """Whether `condition` came to hold; looks in a thread, so that traffic goes on."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if await asyncio.to_thread(condition):
                return True
            await asyncio.sleep(every_s)
        return False

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"the deployment is not whole: {', '.join(self.missing())}\n{self.log()[-3000:]}")
            time.sleep(0.5)


def _can_run(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    return False


def _ray_token() -> dict[str, str]:
    path = Path.home() / ".ray" / "auth_token"
    return authorization(path.read_text().strip() if path.exists() else "")
