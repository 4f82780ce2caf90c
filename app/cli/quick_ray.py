"""Ray that starts quickly: what its own start does one after the other is done beside, or not at all.

Written for Ray 2.60: Ray's own functions are replaced while `ray.init` runs, as it has no settings for any of this.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from app.cli import worker_template
from app.cli.ray_worker import become
from app.config.engine import EngineConfig

# What Ray adds to the environment of each worker of its first job.
RAYS_VARIABLES = {
    "RAY_CLIENT_MODE": "0", "RAY_JOB_ID": "01000000", "RAY_LD_PRELOAD_ON_WORKERS": "0", "SPT_NOENV": "1"
}  # fmt: skip
AGENTS_MODULES = (
    *("aiohttp", "aiohttp_cors", "grpc", "opencensus", "opentelemetry.exporter.prometheus", "opentelemetry.proto"),
    *("prometheus_client", "pydantic"),
)


@contextmanager
def quick_ray(document: dict[str, Any], dashboard: bool) -> Iterator[None]:
    """Within, a cluster that this process starts starts quickly, for this document of Serve's."""
    from ray._private import ray_constants, utils
    from ray._private.node import Node

    by_importing, start_raylet = utils.get_dashboard_dependency_error, Node.start_raylet

    def by_looking() -> ImportError | None:
        return None if all(map(is_installed, AGENTS_MODULES)) else by_importing()

    def start_and_announce(node: Any, *arguments: Any, **options: Any) -> None:
        start_raylet(node, *arguments, **options)
        ((raylet,),) = [started for kind, started in node.all_processes.items() if kind == "raylet"]
        announce_workers(document, raylet.process.pid)

    with ExitStack() as replaced:
        # Each worker is started by ours in the place of Ray's script. Ray joins it to a directory: a whole path stays.
        replaced.enter_context(_replaced(ray_constants, "SETUP_WORKER_FILENAME", become.__file__))
        # Any free one: an agent of Ray's tries for three seconds to have the one that another cluster's has.
        replaced.enter_context(_replaced(ray_constants, "DEFAULT_DASHBOARD_AGENT_LISTEN_PORT", 0))
        # Ray imports, before its node starts, what its agent needs, only to know whether it is installed.
        replaced.enter_context(_replaced(utils, "get_dashboard_dependency_error", by_looking))
        replaced.enter_context(_replaced(Node, "start_raylet", start_and_announce))
        if not dashboard:
            replaced.enter_context(_replaced(Node, "start_api_server", _beside(Node.start_api_server)))
        yield


def fault_of_agent() -> str:
    """Returns what Ray's agent needs and cannot import, to be said where Ray does not start; empty if all is well."""
    from ray._private import utils

    fault: Exception | None
    try:
        fault = utils.get_dashboard_dependency_error()
    except Exception as error:  # a module of another version may fail with anything
        fault = error
    return "" if fault is None else f"; Ray's agent cannot import what it needs: {' '.join(str(fault).split())}"


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def _beside(start: Any) -> Any:
    """Without a dashboard Ray starts its process all the same, and waits a second until it is there. Here a thread
    does, which stays: a process of Ray ends with the thread that has started it."""

    def start_beside(node: Any, **options: Any) -> None:
        def start_and_stay() -> None:
            start(node, **options)
            threading.Event().wait()

        threading.Thread(target=start_and_stay, name="dashboard", daemon=True).start()

    return start_beside


def announce_workers(document: dict[str, Any], raylet: int) -> None:
    """Tell what the environment of workers will be as soon as it is known. Until the first of them Ray takes seconds,
    in which Ray and Serve are imported for them. In another environment they would begin with less that is imported."""
    rays = RAYS_VARIABLES | {"RAY_RAYLET_PID": str(raylet)}
    all_have = {**os.environ, **rays, **variables_of_controller(document)}
    worker_template.announce(become.HOST, all_have)
    from app.engine.executor.transports.compiled_graph import worker_environment  # takes as long as Ray does by now

    worker_template.announce(become.DEVICE, {**all_have, **worker_environment(step_timeout_s(document))})


def variables_of_controller(document: dict[str, Any]) -> dict[str, str]:
    """Those that the document gives it. Mistakes of the document are told by `check_schema`."""
    try:
        given = document["controller_options"]["runtime_env"]["env_vars"].items()
    except (LookupError, TypeError, AttributeError):
        return {}
    return {name: value for name, value in given if isinstance(name, str) and isinstance(value, str)}


def step_timeout_s(document: dict[str, Any]) -> float:
    """The first model's."""
    default: float = EngineConfig.model_fields["step_timeout_s"].default
    try:
        return float(document["applications"][0]["args"]["models"][0]["engine"].get("step_timeout_s", default))
    except (LookupError, TypeError, ValueError, AttributeError):  # its mistake is told by whom it is for
        return default


def is_installed(module: str) -> bool:
    """True if there is such a module; whether it can be imported is another question."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # not even what it is a part of
        return False
