"""`python -m app.cli.deployment FILE [--dashboard]`: what `serve run FILE` does, and ends where Serve gives the
application up.

Serve keeps the reason for its status alone: `serve run` would stay for ever beside an application that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import yaml

from app.cli import worker_template
from app.cli.deploy import deploy
from app.cli.json_console import use_json_console
from app.cli.quick_ray import fault_of_agent, quick_ray
from app.cli.serve_schema import check_schema
from app.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve.schema import ServeStatus

POLL_S = 1.0
SERVE_NAMESPACE = "serve"  # Serve's own constant, which lies behind all that it imports
DASHBOARD = "--dashboard"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*): ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def run(path: Path, dashboard: bool) -> int:
    """Deploy and stay until Ctrl-C or SIGTERM; 1 with a line on stderr when the application cannot start, 2 where what
    is Serve's own in the file has a mistake. `dashboard`: a cluster that this starts has Ray's."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = [each.get("name", "default") for each in document["applications"]]
    is_own = os.environ.get("RAY_ADDRESS") == "local"
    with worker_template.running() if is_own else nullcontext():
        if (code := _start_ray(document, path, dashboard)) is not None:
            return code
        return _serve(path, names, is_own)


def _start_ray(document: dict[str, Any], path: Path, dashboard: bool) -> int | None:
    """Start Ray, or join it: None, or the code to end with. Serve is imported meanwhile, which takes as long as Ray's
    processes do to start; so a mistake in what is Serve's own is told once they have."""
    import ray

    sigterm = Sigterm()
    with ThreadPoolExecutor(1, "import") as thread:
        checked = thread.submit(check_schema, document, path)
        try:
            with quick_ray(document, dashboard):
                ray.init(namespace=SERVE_NAMESPACE, include_dashboard=dashboard)
            sigterm.interrupts()
            use_json_console()
            checked.result()
        except ConfigError as error:
            print(*(f"manta: error: {line}" for line in error.message.splitlines()), sep="\n", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 143 if sigterm.came else 130
        except Exception as error:
            why = f"{type(error).__name__}: {last_error(str(error))}{fault_of_agent()}"
            print(f"manta: error: Ray does not start: {why}", file=sys.stderr)
            return 1
    return None


def _serve(path: Path, names: Sequence[str], is_own: bool) -> int:
    """Deploy on the Ray that runs, and stay; see `run`."""
    from ray import serve

    try:
        failed = _deploy(path) or wait_until_running(names)
        while failed is None:
            time.sleep(3600)
    except KeyboardInterrupt:
        print("manta: shutting down", file=sys.stderr)
        serve.shutdown()
        return 0
    if is_own:
        serve.shutdown()
    else:
        failed += " (it stays on the cluster: `serve status` shows it, `serve shutdown` removes all of Serve)"
    print(f"manta: error: {failed}", file=sys.stderr, flush=True)
    return 1


def _deploy(path: Path) -> str | None:
    """Give Serve the configuration: None, or why it does not start."""
    try:
        deploy(path)
    except Exception as error:
        return f"Serve does not start: {type(error).__name__}: {last_error(str(error))}"
    return None


class Sigterm:
    """SIGTERM as Ctrl-C. Ray's own handler, which `ray.init` installs below Python's, prints stacks and aborts."""

    def __init__(self) -> None:
        self.came = False

    def interrupts(self) -> None:
        """From here on the first one raises KeyboardInterrupt in the main thread, and the next ones nothing."""
        signal.signal(signal.SIGTERM, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.came = True
        raise KeyboardInterrupt


def wait_until_running(names: Sequence[str], poll_s: float = POLL_S) -> str | None:
    """Wait until all these applications run: None, or why one never will."""
    from ray import serve

    while True:
        status = serve.status()
        if failed := failure(status, names):
            return failed
        if all(name in status.applications and status.applications[name].status == "RUNNING" for name in names):
            return None
        time.sleep(poll_s)


def failure(status: ServeStatus, names: Sequence[str]) -> str | None:
    """Why one of these applications failed, in one line; None when none did."""
    for name in names:
        application = status.applications.get(name)
        if application is None or application.status != "DEPLOY_FAILED":
            continue
        causes = [
            f"{deployment}: {last_error(state.message)}"
            for deployment, state in application.deployments.items()
            if state.status == "DEPLOY_FAILED"
        ]
        return f"application {name!r} cannot start: {'; '.join(causes) or last_error(application.message)}"
    return None


def last_error(message: str) -> str:
    """Returns the end of a traceback, without the class's module; the whole message on one line where it is none."""
    lines = [line.strip() for line in _COLOUR.sub("", message).splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if _EXCEPTION.match(line)]
    if starts:
        lines = [_EXCEPTION.sub(r"\1: ", lines[starts[-1]]), *lines[starts[-1] + 1 :]]
    return "; ".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(DASHBOARD, action="store_true")
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    sys.exit(run(given.file, given.dashboard))
