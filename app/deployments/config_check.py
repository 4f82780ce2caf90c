"""Finds what can be known to be wrong with a configuration from the files of this node, before any replica starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from app.api.generation.served_models import check_engine_plugins, check_served_model
from app.api.http.auth import ApiKeys
from app.backends import ROUTING_POLICIES
from app.config.serve import ServeConfig


def check_config(config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
    """The first fault, as replicas would meet it: ConfigError, CheckpointError or UnsupportedError.

    `environ` is that of the replicas.
    """
    for model in config.models:
        check_served_model(model)
        check_engine_plugins(model)
    if ROUTING_POLICIES.plugin(config.router.policy) is not None:
        ROUTING_POLICIES.load(config.router.policy)
    ApiKeys.load(config.ingress, environ)
    if config.admin.is_open:
        ApiKeys.of_operators(config.admin, environ)
