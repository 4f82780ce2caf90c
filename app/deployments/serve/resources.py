"""Finds what the application reserves in a Ray cluster, and what the cluster lacks for it, with the options that ask
for it.

Ray waits for what is not there, and names a sum only. Whether that is a mistake is for the caller to say: a cluster may
grow on demand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.backends import ON_HOST, OWN_PROCESS
from app.config.engine import EngineConfig
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.telemetry.logging import configure_logging

logger = logging.getLogger("manta.serve")

CORES_PER_INGRESS, MOST_INGRESSES = 4, 4  # by default, beside GPUs; without, engines compute on the same cores
MIN_CPUS = 0.001  # a placement group's bundle must not be empty
SLACK = {"CPU": 0.01}  # for those, of all replicas
ROUNDING = 1e-6  # sums of tenths

Resources = Mapping[str, float]  # by Ray's names


@dataclass(frozen=True, slots=True)
class Demand:
    """Says what one part of the application asks for, all its replicas together, and by which options."""

    resource: str
    amount: float
    who: str


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource of which the cluster has less in all than its parts ask for."""

    resource: str
    need: float
    has: float
    demands: tuple[Demand, ...]

    def __str__(self) -> str:
        parts = "; ".join(f"{demand.amount:g} for {demand.who}" for demand in self.demands)
        return f"{self.need:g} {self.resource} are needed, the cluster has {self.has:g}: {parts}"


def cluster_resources() -> dict[str, float]:
    """All that the Ray cluster has; nothing when this process has no Ray (which is not started for the question)."""
    import ray  # which `manta serve` does without before it becomes another process

    return dict(ray.cluster_resources()) if ray.is_initialized() else {}


def cluster_nodes() -> list[Resources]:
    """The same, node by node."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []


def runs_here(config: ServeConfig) -> bool:
    """True if all replicas will be on this machine: the only one of the cluster, and large enough."""
    import ray

    if not ray.is_initialized() or len(cluster_nodes()) != 1:
        return False
    return not shortages([config], cluster_resources())


def warn_of_shortages(config: ServeConfig) -> None:
    """One warning that names all that will be waited for, if Ray is up in this process; `serve run` shows it.

    The number of replicas is the configuration's: what `deployments:` of the Serve application says is not known here.
    """
    import ray

    if not ray.is_initialized():
        return
    nodes = cluster_nodes()
    lines = [str(shortage) for shortage in shortages([config], cluster_resources())]
    lines += [line for model in config.models if (line := node_shortage(model, nodes))]
    if lines:
        configure_logging()  # Serve keeps its own log to files
        logger.warning("the cluster lacks resources; replicas wait until nodes are added:\n  %s", "\n  ".join(lines))


def num_ingresses(config: ServeConfig, nodes: Sequence[Resources]) -> int:
    """Counts the ingresses that there shall be: what the configuration says, else by the cores of the largest of
    `nodes`. One where the operator counts by ingress: cores that each reserves, requests in each, memory of each."""
    if config.ingress.num_replicas is not None:
        return config.ingress.num_replicas
    total = _sum(nodes)
    has_gpus = any(_gpus_per_worker(model, total) for model in config.models)
    if not has_gpus or config.ingress.num_cpus or config.ingress.is_bounded or config.admission.counts_requests:
        return 1
    cores = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
    return max(1, min(MOST_INGRESSES, int(cores) // CORES_PER_INGRESS))


def shortages(configs: Iterable[ServeConfig], total: Resources) -> list[Shortage]:
    """Finds the resources that the applications need more of than there are in `total`."""
    demands = [demand for config in configs for demand in _demands(config, total)]
    found = []
    for resource in ("CPU", "GPU"):
        own = tuple(demand for demand in demands if demand.resource == resource and demand.amount)
        need, has = sum(demand.amount for demand in own), total.get(resource, 0.0)
        if need > has + SLACK.get(resource, 0.0) + ROUNDING:
            found.append(Shortage(resource, need, has, own))
    return found


def node_shortage(model: ModelConfig, nodes: Sequence[Resources]) -> str | None:
    """Why no replica of `model` can be laid over `nodes`, whatever they have in all; None when this stops none."""
    gpus = any(node.get("GPU", 0) > 0 for node in nodes)
    bundles: list[Resources] = list(replica_bundles(model, {"GPU": float(gpus)}))
    strategy = f"placement_strategy={model.placement_strategy}"
    if model.placement_strategy == "STRICT_SPREAD" and len(bundles) > len(nodes):
        return f"model {model.name!r}: {strategy} wants {len(bundles)} nodes, the cluster has {len(nodes)}"
    whole = model.placement_strategy == "STRICT_PACK"
    for piece in [_sum(bundles)] if whole else bundles:
        if not any(_fits(piece, node) for node in nodes):
            wanted = " and ".join(f"{amount:g} {name}" for name, amount in piece.items())
            why = f"{strategy} puts a whole replica on one node" if whole else "one bundle of the replica needs that"
            return f"model {model.name!r}: no node has {wanted}; {why}"
    return None


def replica_bundles(model: ModelConfig, total: Resources) -> list[dict[str, float]]:
    """The placement group of one replica: its own bundle first, then one per worker; one bundle in all when the
    only worker runs in the replica's process. Whether device=auto takes a GPU depends on the cluster's `total`."""
    own = {"CPU": max(model.replica_cpus, MIN_CPUS)}
    worker: dict[str, float] = {"CPU": model.cpus_per_worker} if model.cpus_per_worker else {}
    gpus = _gpus_per_worker(model, total)
    if gpus:
        worker["GPU"] = gpus
    if model.engine.executor in OWN_PROCESS:
        return [{**worker, "CPU": own["CPU"] + model.cpus_per_worker}]
    return [own, *({**worker} if worker else {"CPU": MIN_CPUS} for _ in range(model.engine.world_size))]


def _gpus_per_worker(model: ModelConfig, total: Resources) -> float:
    if model.gpus_per_worker is not None:
        return model.gpus_per_worker
    return float(_uses_gpu(model.engine, total))


def _uses_gpu(engine: EngineConfig, total: Resources) -> bool:
    if engine.device != "auto":
        return engine.device not in ON_HOST
    return total.get("GPU", 0) > 0


def _demands(config: ServeConfig, total: Resources) -> list[Demand]:
    demands = []
    for name, share in (("ingress", config.ingress), ("router", config.router)):
        number = share.num_replicas or 1
        options = f"{name}.num_replicas={number} x {name}.num_cpus={share.num_cpus:g}"
        demands.append(Demand("CPU", number * share.num_cpus, f"the {name} ({options})"))
    for model in config.models:
        replica = _sum(replica_bundles(model, total))
        for resource in replica:
            who = f"model {model.name!r} ({_options(model, resource, total)})"
            demands.append(Demand(resource, model.start_replicas * replica[resource], who))
    return demands


def _options(model: ModelConfig, resource: str, total: Resources) -> str:
    """The options that ask for `resource`, as the sum that they make."""
    engine = model.engine
    workers = (
        f"engine.tensor_parallel_size={engine.tensor_parallel_size} x "
        f"engine.pipeline_parallel_size={engine.pipeline_parallel_size}"
    )
    if resource == "GPU":
        replica = f"{workers} x gpus_per_worker={_gpus_per_worker(model, total):g}"
    else:
        replica = f"(replica_cpus={model.replica_cpus:g} + {workers} x cpus_per_worker={model.cpus_per_worker:g})"
    option = "num_replicas" if model.autoscaling is None else "autoscaling.initial_replicas"
    return f"{option}={model.start_replicas} x {replica}"


def _sum(bundles: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _fits(piece: Resources, node: Resources) -> bool:
    return all(amount <= node.get(name, 0.0) + ROUNDING for name, amount in piece.items())
