"""Gives Serve a configuration, as `serve run` does, but as soon as Serve's controller is there.

Serve's proxies take about as long to start as the process that builds the application, and neither needs the other.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

POLL_S = 0.02


def deploy(path: Path) -> None:
    """Start Serve where it does not run yet, and return once its proxies are ready and it has the configuration."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    started: Future[None] = Future()
    threading.Thread(target=_start, args=(config, started), name="serve-start", daemon=True).start()
    client: Any = None
    while client is None:
        if started.done():
            started.result()
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            time.sleep(POLL_S)
    client.deploy_apps(config)
    started.result()


def _start(config: ServeDeploySchema, started: Future[None]) -> None:
    from ray import serve
    from ray.serve.config import gRPCOptions

    try:
        serve.start(
            proxy_location=config.proxy_location,
            http_options=config.http_options.model_dump(),
            grpc_options=gRPCOptions(**config.grpc_options.model_dump()),
            controller_options=config.controller_options,
        )
        started.set_result(None)
    except BaseException as error:  # the caller's to raise
        started.set_exception(error)
