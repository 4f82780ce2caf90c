"""Runs `serve run` on a Serve YAML as a user would, on ports of its own, and leaves nothing behind.

Benchmarks and end-to-end tests share it. Each instance is its own Ray cluster with its own temporary directory, so
that it meets neither a user's cluster nor another test's.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from app.engine.executor import own_ray

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A TCP port that nobody listens on now.

    Below the range from which the system draws ports for connections, or one of Ray's many would take it before it is
    used, and clear of those that Ray's workers (10002-19999) and Serve's replicas (30000-31000) listen on.
    """
    while True:
        port = random.randint(20_000, 29_999)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def interruptible(*arguments: str) -> list[str]:
    """Returns a command line of this Python with `arguments` that SIGINT ends.

    A shell's background jobs ignore the signal, and so do their children. Setting it between fork and exec would need
    a real fork, which the system may refuse to a parent with much memory.
    """
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code, sys.executable, *arguments]


class ServeProcess:
    """`with ServeProcess(yaml) as server:` serves at `server.base_url` until the block ends.

    `edit(config)` may change the loaded YAML before it is written out; `log_path` holds what `serve run` printed.
    `module` is what runs the YAML: Serve's own command, or one that becomes it; `environ` is added to its environment,
    where RAY_ADDRESS names a cluster that is there. Serve takes ten seconds to end gracefully; without
    `ends_gracefully` all processes are killed at once.
    """

    def __init__(
        self,
        config: Path | str,
        edit: Any = None,
        ready_timeout_s: float = 180.0,
        module: Sequence[str] = ("ray.serve.scripts", "run"),
        ends_gracefully: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.ready_timeout_s = ready_timeout_s
        self._module = module
        self._ends_gracefully = ends_gracefully
        self.environ = dict(environ or {})
        self.start_time_s = 0.0
        self._last_log = ""  # once the block has ended and its directory is gone
        # Short: unix socket paths under it may not exceed 107 characters.
        self.tmp = Path(tempfile.mkdtemp(prefix="mnt", dir="/tmp"))
        self.log_path = self.tmp / "serve.log"
        self._config = self._write_config(Path(config), edit)
        self._process: subprocess.Popen[bytes] | None = None

    def _write_config(self, source: Path, edit: Any) -> Path:
        config = yaml.safe_load(source.read_text())
        config.setdefault("http_options", {})["port"] = self.port
        env = {
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(self.tmp / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(self.tmp / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(self.tmp),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(self.tmp / "server-state"),
        }
        runtime_envs = [config.setdefault("controller_options", {}).setdefault("runtime_env", {})]
        runtime_envs += [application.setdefault("runtime_env", {}) for application in config["applications"]]
        for runtime_env in runtime_envs:
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **env}
        if edit is not None:
            edit(config)
        path = self.tmp / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def __enter__(self) -> ServeProcess:
        env = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "RAY_TMPDIR": str(self.tmp / "ray"),
            **own_ray.SETTINGS,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            **self.environ,
        }
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                interruptible("-m", *self._module, str(self._config)),
                cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        begin = time.monotonic()
        try:
            self._wait_until_ready(begin)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.start_time_s = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes = self.processes()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT if self._ends_gracefully else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        processes += self._stragglers()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        self._last_log = self.log()
        shutil.rmtree(self.tmp, ignore_errors=True)

    def _stragglers(self) -> list[psutil.Process]:
        """Processes that lost their parent (HAProxy does, when its manager is killed): they name our directory."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.tmp) in argument for argument in process.cmdline()):
                    found.append(process)
        return found

    def _wait_until_ready(self, begin: float) -> None:
        assert self._process is not None
        while time.monotonic() - begin < self.ready_timeout_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"serve run ended with {self._process.returncode}:\n{self.log()[-4000:]}")
            if self.health() == 200:
                return
            time.sleep(0.2)
        raise RuntimeError(f"not ready after {self.ready_timeout_s} s:\n{self.log()[-4000:]}")

    def deploy(self, change: Callable[[dict[str, Any]], None], timeout_s: float = 120.0) -> None:
        """`serve deploy` of the YAML with its application changed, to this cluster; RuntimeError says why not."""
        config = yaml.safe_load(self._config.read_text())
        change(config["applications"][0])
        path = self.tmp / "changed.yaml"
        path.write_text(yaml.safe_dump(config))
        done = subprocess.run(
            [sys.executable, "-m", "ray.serve.scripts", "deploy", str(path), "-a", self.dashboard()],
            env={**os.environ, "RAY_AUTH_MODE": "token"}, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"serve deploy ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    def dashboard(self) -> str:
        """Address of Ray's dashboard."""
        found = re.search(r"dashboard at \S*?(http://[\d.:]+)", self.log())
        if found is None:
            raise RuntimeError("the server's log names no dashboard")
        return found.group(1)

    def health(self) -> int:
        """HTTP status of /health; 0 when nothing answers."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, ValueError):
            return 0

    def processes(self) -> list[psutil.Process]:
        """`serve run` and everything that it started."""
        if self._process is None:
            return []
        try:
            root = psutil.Process(self._process.pid)
        except psutil.NoSuchProcess:
            return []
        return [root, *root.children(recursive=True)]

    def find(self, text: str) -> list[psutil.Process]:
        """Processes whose title or command line holds `text` (Ray actors carry their class and method)."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def cpu_time_s(self) -> float:
        """CPU seconds that all processes have used so far."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def log(self) -> str:
        """What `serve run` printed."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else self._last_log
