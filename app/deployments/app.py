"""`build(args) -> Application`: the graph Ingress -> Router, and one EngineReplica deployment per model.

The import path of every file in configs/serve. A change of `args` replaces every replica; to change only the number
of replicas of a model, set `num_replicas` under the application's `deployments:` (Engine-<model>).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.deployments.admin.admin import Admin
from app.deployments.admin.shared_state import ADMIN
from app.deployments.autoscaling.serve_policy import engine_config, front_config
from app.deployments.config_check import check_config
from app.deployments.ingress.ingress import Ingress
from app.deployments.process.start_errors import start_errors_logged
from app.deployments.replica.engine_factory import EngineFactory
from app.deployments.replica.engine_replica import EngineReplica
from app.deployments.router.router import Router
from app.deployments.serve.http_server import HOOK
from app.deployments.serve.pinned_request_router import PinnedRequestRouter
from app.deployments.serve.resources import (
    cluster_nodes,
    cluster_resources,
    num_ingresses,
    replica_bundles,
    runs_here,
    warn_of_shortages,
)
from app.deployments.serve.serve_args import parse_args
from app.telemetry.logging import configure_logging

logger = logging.getLogger("manta.serve")

# Serve sees a channel as one endless request; admission and load are counted by ourselves (I9).
MAX_ONGOING_REQUESTS = 10_000
DRAIN_CHECK_S = 0.5  # how often Serve asks a stopping replica whether it is done
HEALTH_PERIOD_S = 1.0  # how often Serve asks ingresses and Routers for their health: so soon a dead one is replaced
ON_HEAD = "node:__internal_head__"  # a resource that Ray gives to the node of its head
HEALTH_TIMEOUT_S = 5.0  # a replica that does not answer three times in turn hangs


@start_errors_logged("the application")
def build(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application of a configuration (the fields of ServeConfig). ConfigError names what is wrong in it."""
    config = parse_args(args)
    if runs_here(config):  # else models and key files may lie on other nodes than this
        check_config(config)
    warn_of_shortages(config)
    _say_what_starts(config)
    return build_graph(config)


def _say_what_starts(config: ServeConfig) -> None:
    """A line for whoever waits at the console; each part says itself when it starts to work."""
    configure_logging()
    engines = ", ".join(f"{model.start_replicas} x {model.name}" for model in config.models)
    number = num_ingresses(config, cluster_nodes())
    logger.info("starting the router, ingresses (%d) and engine replicas (%s)", number, engines)


def build_graph(config: ServeConfig, engine_factory: EngineFactory | None = None) -> serve.Application:
    """The graph over the real engine; tests put another one in."""
    engines = {model.name: _engine(config, model, engine_factory) for model in config.models}
    admin = (_admin(config, engines),) if config.has_admin else ()
    counted = _with_ingresses(config)  # engines are not told: they stay as they are where the number changes
    return _ingress(counted).bind(counted, _router(config, engines), engines, *admin)


def _with_ingresses(config: ServeConfig) -> ServeConfig:
    """The configuration with a number of ingresses, whoever has chosen it."""
    number = num_ingresses(config, cluster_nodes())
    return config.model_copy(update={"ingress": config.ingress.model_copy(update={"num_replicas": number})})


def _router(config: ServeConfig, engines: dict[str, serve.Application]) -> serve.Application:
    options = serve.deployment(Router).options(
        name="Router",
        num_replicas=config.router.num_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": config.router.num_cpus},
        max_surge_percent=_surge(config.router.num_cpus),
        graceful_shutdown_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
    )
    return options.bind(config.router, engines, config.admission)


def _ingress(config: ServeConfig) -> Any:
    return serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress",
        **_front_replicas(config),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": config.ingress.num_cpus, "runtime_env": {"env_vars": HOOK}},
        max_surge_percent=_surge(config.ingress.num_cpus),
        graceful_shutdown_timeout_s=config.ingress.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
    )


def _admin(config: ServeConfig, engines: dict[str, serve.Application]) -> serve.Application:
    options = serve.deployment(Admin).options(
        name=ADMIN,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0.0, "resources": {ON_HEAD: 0.001}},
        graceful_shutdown_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
    )
    return options.bind(config, engines)


def _front_replicas(config: ServeConfig) -> dict[str, Any]:
    """An ingress reports to the autoscaling of engines who waits for them; only then it costs something."""
    number = config.ingress.num_replicas or 1
    if all(model.autoscaling is None for model in config.models):
        return {"num_replicas": number}
    return {"autoscaling_config": front_config(number, any(_may_sleep(model) for model in config.models))}


def _may_sleep(model: ModelConfig) -> bool:
    return model.autoscaling is not None and model.autoscaling.min_replicas == 0


def _replicas(model: ModelConfig) -> dict[str, Any]:
    if model.autoscaling is None:
        return {"num_replicas": model.num_replicas}
    return {"autoscaling_config": engine_config(model, model.autoscaling)}


def _surge(num_cpus: float) -> int:
    """Extra replicas in an update, in percent: what reserves nothing fits beside what it replaces, so that the new one
    is there before the old one goes. Where that needs room, who has it says so under `deployments:`."""
    return 0 if num_cpus else 100


def _engine(config: ServeConfig, model: ModelConfig, factory: EngineFactory | None) -> serve.Application:
    bundles = replica_bundles(model, cluster_resources())
    own = {"num_cpus": bundles[0]["CPU"], "num_gpus": bundles[0].get("GPU", 0)}
    options = serve.deployment(EngineReplica).options(
        name=f"Engine-{re.sub(r'[^A-Za-z0-9_.-]', '-', model.name)}",
        **_replicas(model),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options=own,
        placement_group_bundles=bundles,
        placement_group_strategy=model.placement_strategy,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=model.health_check_period_s,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=PinnedRequestRouter),
    )
    return options.bind(model, config.ingress, config.router, factory, config.has_admin)
