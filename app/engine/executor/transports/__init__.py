"""Chooses how steps reach the workers: `step_transport: auto` among app/backends.py's transports."""

from __future__ import annotations

from app.backends import ON_HOST, STEP_TRANSPORTS
from app.engine.executor.transports.base import StepTransport
from app.engine.executor.worker_group.group import WorkerGroup

SET = "set by step_transport"  # the reason for a choice that was made in the configuration


def create_transport(name: str, worker_group: WorkerGroup, max_inflight: int, step_timeout_s: float) -> StepTransport:
    """The transport `name` to the workers of the group, not started yet."""
    transport: StepTransport = STEP_TRANSPORTS.load(name)(worker_group, max_inflight, step_timeout_s)
    return transport


def choose_transport(step_transport: str, device: str, on_this_node: bool) -> tuple[str, str]:
    """Name of the transport and the reason for it, for workers on `device` ("cpu", "cuda", "cuda:0"); `on_this_node`:
    all of them are where the driver is."""
    if step_transport != "auto":
        return step_transport, SET
    if not on_this_node:  # Ray 2.60: its process of the driver's node crashes on an answer after the teardown
        return "socket", "the workers are not all on this node"
    if device.partition(":")[0] in ON_HOST:
        return "socket", "CPU: a compiled graph's waiting would take a whole core"
    return "compiled_graph", "GPU workers have a core to spare for its waiting"
