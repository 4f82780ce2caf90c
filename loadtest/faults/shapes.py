"""The deployments that faults strike: the shipped configuration of two replicas, and what some faults need besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serve_process import ROOT

Edit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """A deployment: its file in configs/serve, what is changed in it, and the Ray cluster that it joins.

    With `num_nodes` its cluster is started first, by `ray start`, with a raylet a node; without, by `serve run`.
    """

    name: str
    edit_args: Edit | None = None  # of the application
    config: Path = ROOT / "configs/serve/two-replicas.yaml"
    import_path: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)  # `{tmp}` is the deployment's directory
    library: Path | None = None  # a file of C, which is built as `{tmp}/library.so`
    num_replicas: int = 2  # engines, and ingresses
    num_workers: int = 2  # of all engines
    num_nodes: int = 0
    node_cpus: float = 2
    redis: bool = False
    has_link: bool = False  # the second node in a network of its own, behind relay.py
    module: tuple[str, ...] = ("ray.serve.scripts", "run")
    is_exact: bool = False  # answers are the same to the bit, whatever runs beside a request

    def edit(self, config: dict[str, Any]) -> None:
        """Change the loaded YAML."""
        application = config["applications"][0]
        if self.import_path:
            application["import_path"] = self.import_path
        if self.edit_args is not None:
            self.edit_args(application["args"])


def _worker_group(args: dict[str, Any]) -> None:
    """Two tensor-parallel workers a replica."""
    (model,) = args["models"]
    model["cpus_per_worker"] = 0.25
    model["engine"]["tensor_parallel_size"] = 2


def _little_memory(args: dict[str, Any]) -> None:
    """A KV cache that holds a few of the streams."""
    (model,) = args["models"]
    model["engine"]["num_blocks"] = 160


def _much_memory(args: dict[str, Any]) -> None:
    """A KV cache that holds the whole crowd (crowd.py) on one replica: whoever takes replicas away leaves such."""
    (model,) = args["models"]
    model["engine"]["kv_cache_memory_bytes"] = 768 << 20


def _exact(args: dict[str, Any]) -> None:
    """Logits in bf16 that do not depend on the rest of a step."""
    (model,) = args["models"]
    model["engine"] |= {"dtype": "bfloat16", "deterministic": "batch"}


# Ray looks for a dead node every three seconds, five times: made for clusters of thousands.
_WATCHFUL = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
_PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "300"}

_OWN_CLOCK = {"LD_PRELOAD": "{tmp}/library.so", "MANTA_CLOCK": "{tmp}/clock"}

PAIR = Shape("pair")
WORKER_GROUP = Shape("worker_group", _worker_group, num_workers=4)
EXACT = Shape("exact", _exact, is_exact=True)
LITTLE_MEMORY = Shape("little memory", _little_memory)
ROOMY = Shape("much memory", _much_memory)
NODES = Shape("two nodes", num_nodes=2, node_cpus=1, environ=_WATCHFUL)
ROOMY_NODES = Shape("two nodes, much memory", _much_memory, num_nodes=2, node_cpus=1, environ=_WATCHFUL)
FAR_NODES = Shape("far nodes", num_nodes=2, node_cpus=1, environ=_WATCHFUL, has_link=True)
REDIS = Shape("redis", num_nodes=1, redis=True, environ=_PATIENT)
OWN_CLOCK = Shape("own clock", environ=_OWN_CLOCK, library=Path(__file__).with_name("clock_shim.c"))
OWN_MOUNTS = Shape("own mounts", module=("loadtest.faults.own_mounts",))
HARMFUL = Shape("harmful", import_path="loadtest.faults.harmful_app:build")
