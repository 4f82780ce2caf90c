"""What can be known to be wrong before Ray starts, each as one line that says what to change.

Without it, the same mistakes would be found by a replica on some node, minutes later and in its log.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.api.served_models import check_engine_plugins, check_served_model
from app.backends import ON_HOST
from app.cli.cluster import RunningServe
from app.cli.configuration import Configuration
from app.cli.machine import Machine
from app.cli.model_memory import compute_dtype, kv_bytes_per_token, weights_bytes
from app.config import EngineConfig, ModelConfig, ServeConfig
from app.deployments.config_check import check_config
from app.engine.model_info import ModelInfo
from app.errors import ConfigError
from app.registry import suggestion

GIB = 1 << 30
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}


def check(configuration: Configuration, machine: Machine) -> None:
    """All checks. ConfigError, CheckpointError or UnsupportedError with the first thing that is wrong."""
    if configuration.file is not None:
        _check_schema(configuration.document, configuration.file)
    for index, config in configuration.applications.items():
        ours = os.environ if machine.cluster is None else {}  # a cluster's replicas have their nodes' environment
        check_config(config, {**ours, **configuration.env_vars(index)})
        for model in config.models:
            _check_device(model.engine, machine)
    configs = list(configuration.applications.values())
    _check_resources(configs, machine)
    _check_memory([model for config in configs for model in config.models], machine)
    if machine.cluster is None:
        check_port(*configuration.address)
        _check_haproxy_ports(configuration.document)
    elif machine.cluster.serve is not None:
        _check_running_serve(configuration, machine.cluster.serve, machine.name)


def check_offline(engine: EngineConfig, machine: Machine) -> None:
    """The checks of a model that this process is to run itself."""
    model = ModelConfig(name="offline", engine=engine)
    check_served_model(model)
    check_engine_plugins(model)
    _check_device(engine, machine)
    _check_memory([model], machine)


def _check_schema(document: dict[str, Any], file: Path) -> None:
    """The parts of the file that belong to Serve, which itself would pass over a key that it does not know."""
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    applications = document["applications"]
    parts = [(document, ServeDeploySchema, "")]
    parts += [(each, ServeApplicationSchema, f"applications.{i}.") for i, each in enumerate(applications)]
    for part, schema, place in parts:
        for key in part.keys() - schema.model_fields.keys():
            hint = suggestion(str(key), schema.model_fields)
            raise ConfigError(f"{file}: {place}{key}: no such option of Serve; {hint}")
    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        details = error.errors(include_url=False)
        lines = [f"{file}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details]
        raise ConfigError("\n".join(lines)) from None


# ---- the machine


def _on_gpu(engine: EngineConfig, machine: Machine) -> bool:
    return engine.device not in ON_HOST and (engine.device != "auto" or machine.gpus > 0)


def _check_device(engine: EngineConfig, machine: Machine) -> None:
    if engine.device not in ("auto", *ON_HOST) and machine.gpus == 0:
        raise ConfigError(
            f"device={engine.device}, but {machine.name} has no GPU: set --device cpu, or use one that has"
        )


def _check_resources(configs: list[ServeConfig], machine: Machine) -> None:
    """Ray would wait for CPUs and GPUs that never come."""
    from app.deployments.resources import shortages

    for shortage in shortages(configs, {"CPU": machine.cpus, "GPU": machine.gpus}):
        grows = " (--skip-preflight if the cluster grows on demand)" if machine.cluster else ""
        raise ConfigError(
            f"the application needs {shortage.need:g} {shortage.resource}s, {machine.name} has {shortage.has:g}: "
            f"lower {_remedies(configs, shortage.resource)}{grows}"
        )


def _remedies(configs: list[ServeConfig], resource: str) -> str:
    """The options that ask for more than one of something, and the share of each worker."""
    models = [model for config in configs for model in config.models]
    names = ["num_replicas"] if any(model.start_replicas > 1 for model in models) else []
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        names += [name] if any(getattr(model.engine, name) > 1 for model in models) else []
    *others, last = [*names, f"{resource.lower()}s_per_worker"]
    return f"{', '.join(others)} or {last}" if others else last


def _check_memory(models: list[ModelConfig], machine: Machine) -> None:
    total = 0
    for model in models:
        engine, info = model.engine, ModelInfo.of(model.engine)
        on_gpu = _on_gpu(engine, machine)
        dtype = compute_dtype(engine, info, on_gpu)
        weights = weights_bytes(info, dtype, engine.load_format)
        if on_gpu:
            _check_gpu_memory(engine, weights, machine)
        else:
            total += model.start_replicas * (weights + _cpu_kv_bytes(engine, info, dtype))
    if machine.free_bytes is not None and total > machine.free_bytes:
        raise ConfigError(
            f"too little memory: weights and KV caches take {total / GIB:.1f} GiB, {machine.name} has "
            f"{machine.free_bytes / GIB:.1f} GiB free: lower kv_cache_memory_bytes or num_replicas, or take a smaller "
            "model"
        )


def _check_gpu_memory(engine: EngineConfig, weights: int, machine: Machine) -> None:
    if machine.gpu_memory_bytes is None:
        return
    share = weights // (engine.tensor_parallel_size * engine.pipeline_parallel_size) - int(engine.cpu_offload_gb * GIB)
    budget = int(machine.gpu_memory_bytes * engine.gpu_memory_utilization)
    if share > budget:
        raise ConfigError(
            f"too little memory: the weights take {share / GIB:.1f} GiB of each GPU, of which {budget / GIB:.1f} GiB "
            "may be used: raise gpu_memory_utilization or tensor_parallel_size, or take a smaller model"
        )


def _cpu_kv_bytes(engine: EngineConfig, info: ModelInfo, dtype: str) -> int:
    """Bytes that the KV cache will take; ConfigError when it could not hold one request."""
    if not info.is_causal:
        return 0  # an encoder has no cache
    per_block = kv_bytes_per_token(info, dtype) * engine.block_size
    if engine.num_blocks is not None:
        return engine.num_blocks * per_block
    max_model_len = engine.max_model_len or info.max_position_embeddings
    needed = -(-max_model_len // engine.block_size)
    affordable = engine.kv_cache_memory_bytes // per_block
    if affordable < needed and engine.hybrid_kv_cache == "auto" and info.hf_config.get("sliding_window"):
        return engine.kv_cache_memory_bytes  # may hold one, as some layers keep less: the workers know
    if affordable < needed:
        raise ConfigError(
            f"too little memory: kv_cache_memory_bytes={engine.kv_cache_memory_bytes} holds "
            f"{affordable * engine.block_size} tokens, less than one request of max_model_len={max_model_len}: raise "
            f"it to {needed * per_block} or lower max_model_len"
        )
    return min(affordable, needed * engine.max_num_seqs) * per_block


def _check_running_serve(configuration: Configuration, running: RunningServe, where: str) -> None:
    """A cluster has one Serve with one port: on that port the applications are updated, another is never opened."""
    port = configuration.address[1]
    if running.port != port:
        names = ", ".join(map(repr, running.applications)) or "no application"
        raise ConfigError(
            f"port {port}: Serve on {where} listens on {running.port} for all its applications ({names}); give --port "
            f"{running.port} to update them, or set RAY_ADDRESS=local to serve from a cluster of its own"
        )


def _check_haproxy_ports(document: dict[str, Any]) -> None:
    """Serve's own ports: a second Serve on the machine would fail on them, with a line in a log only."""
    runtime_env = (document.get("controller_options") or {}).get("runtime_env") or {}
    variables = {**os.environ, **(runtime_env.get("env_vars") or {})}
    if variables.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return
    for name, default in HAPROXY_PORTS.items():
        port = str(variables.get(name, default))
        if port.isdigit() and not _is_free("0.0.0.0", int(port)):
            raise ConfigError(
                f"port {port} ({name}) is taken, likely by another Serve on this machine: stop it, or set {name} in "
                "the env_vars of a YAML"
            )


def _is_free(host: str, port: int) -> bool:
    try:
        check_port(host, port)
    except ConfigError:
        return False
    return True


def check_port(host: str, port: int) -> None:
    """ConfigError when nothing can listen there."""
    if not 0 < port < 1 << 16:
        raise ConfigError(f"port {port} is no port: set --port to 1..65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r}: {error.strerror}; set --host to an address of this machine") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken: stop what listens there, or choose another with --port"
            ) from None
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host or --port"
        ) from None
