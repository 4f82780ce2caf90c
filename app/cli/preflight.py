"""Finds what can be known to be wrong before Ray starts, each as one line that says what to change.

Without it, the same mistakes would be found by a replica on some node, minutes later and in its log.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from app.api.generation.served_models import check_engine_plugins, check_served_model
from app.backends import ON_HOST, QUANT_METHODS
from app.checkpoints.model_info import ModelInfo
from app.cli.cluster import RunningServe
from app.cli.configuration import Configuration
from app.cli.machine import Machine
from app.cli.model_memory import compute_dtype, kv_bytes_per_token, weights_bytes
from app.cli.serve_ports import bind, taken_port
from app.config.engine import EngineConfig
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.deployments.config_check import check_config
from app.errors import ConfigError
from app.records.step_budget import whole_prompts

GIB = 1 << 30
Lack = Callable[[str], None]  # takes a line on what the machine lacks


def refuse(line: str) -> None:
    """Raises an error for what the machine lacks."""
    raise ConfigError(line)


def check(configuration: Configuration, machine: Machine, lack: Lack = refuse) -> None:
    """All checks. ConfigError, CheckpointError or UnsupportedError with the first thing that is wrong. What is right
    and only lacks a port, CPUs, GPUs or memory of `machine` goes to `lack`.
    """
    for index, config in configuration.applications.items():
        ours = os.environ if machine.cluster is None else {}  # a cluster's replicas have their nodes' environment
        check_config(config, {**ours, **configuration.env_vars(index)})
        for model in config.models:
            _check_device(model.engine, machine, lack)
    configs = list(configuration.applications.values())
    _check_resources(configs, machine, lack)
    _check_memory([model for config in configs for model in config.models], machine, lack)
    if machine.cluster is None:
        check_port(*configuration.address, lack)
        if (taken := taken_port(configuration.document)) is not None:
            lack(taken)
    elif machine.cluster.serve is not None:
        _check_running_serve(configuration, machine.cluster.serve, machine.name)


def check_offline(engine: EngineConfig, machine: Machine) -> None:
    """The checks of a model that this process is to run itself."""
    model = ModelConfig(name="offline", engine=engine)
    check_served_model(model)
    check_engine_plugins(model)
    _check_device(engine, machine, refuse)
    _check_memory([model], machine, refuse)


# ---- the machine


def _on_gpu(engine: EngineConfig, machine: Machine) -> bool:
    return engine.device not in ON_HOST and (engine.device != "auto" or machine.gpus > 0)


def _check_device(engine: EngineConfig, machine: Machine, lack: Lack) -> None:
    if engine.device not in ("auto", *ON_HOST) and machine.gpus == 0:
        lack(f"device={engine.device}, but {machine.name} has no GPU: set --device cpu, or use one that has")


def _check_resources(configs: list[ServeConfig], machine: Machine, lack: Lack) -> None:
    """Ray would wait for CPUs and GPUs that never come."""
    from app.deployments.serve.resources import shortages

    for shortage in shortages(configs, {"CPU": machine.cpus, "GPU": machine.gpus}):
        grows = " (--skip-preflight if the cluster grows on demand)" if machine.cluster else ""
        lack(
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


def _check_quantization(engine: EngineConfig, info: ModelInfo) -> None:
    """ConfigError where the method that is named needs quantized weights, and the model's are plain."""
    if engine.quantization is None or info.quantization_scheme:
        return
    try:
        QUANT_METHODS.load(engine.quantization).while_loading()
    except ConfigError as error:
        line = error.message.removeprefix("quantization: ")
        raise ConfigError(f"--quantization {engine.quantization} with model {engine.model!r}: {line}") from None


def _check_memory(models: list[ModelConfig], machine: Machine, lack: Lack) -> None:
    total = 0
    for model in models:
        engine, info = model.engine, ModelInfo.of(model.engine)
        _check_quantization(engine, info)
        on_gpu = _on_gpu(engine, machine)
        dtype = compute_dtype(engine, info, on_gpu)
        weights = weights_bytes(info, dtype, engine.load_format)
        if on_gpu:
            _check_gpu_memory(engine, weights, machine, lack)
        else:
            total += model.start_replicas * (weights + _cpu_kv_bytes(engine, info, dtype))
    if machine.free_bytes is not None and total > machine.free_bytes:
        lack(
            f"too little memory: weights and KV caches take {total / GIB:.1f} GiB, {machine.name} has "
            f"{machine.free_bytes / GIB:.1f} GiB free: lower kv_cache_memory_bytes or num_replicas, or take a smaller "
            "model"
        )


def _check_gpu_memory(engine: EngineConfig, weights: int, machine: Machine, lack: Lack) -> None:
    if machine.gpu_memory_bytes is None:
        return
    share = weights // (engine.tensor_parallel_size * engine.pipeline_parallel_size) - int(engine.cpu_offload_gb * GIB)
    budget = int(machine.gpu_memory_bytes * engine.gpu_memory_utilization)
    if share > budget:
        lack(
            f"too little memory: the weights take {share / GIB:.1f} GiB of each GPU, of which {budget / GIB:.1f} GiB "
            "may be used: raise gpu_memory_utilization or tensor_parallel_size, or take a smaller model"
        )


def _cpu_kv_bytes(engine: EngineConfig, info: ModelInfo, dtype: str) -> int:
    """Bytes that the KV cache will take; ConfigError when it could not hold one request."""
    max_model_len = engine.max_model_len or info.max_position_embeddings
    if whole_prompts(engine, info, max_model_len):
        return 0  # nothing is cached
    per_block = kv_bytes_per_token(info, dtype) * engine.block_size
    if engine.num_blocks is not None:
        return engine.num_blocks * per_block
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


def check_port(host: str, port: int, lack: Lack = refuse) -> None:
    """ConfigError where no machine could listen there; `lack` hears that this one cannot."""
    if not 0 < port < 1 << 16:
        raise ConfigError(f"port {port} is no port: set --port to 1..65535")
    try:
        bind(host, port)
    except socket.gaierror as error:
        lack(f"host {host!r}: {error.strerror}; set --host to an address of this machine")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            lack(f"port {port} on {host} is taken: stop what listens there, or choose another with --port")
            return
        lack(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host or --port")
