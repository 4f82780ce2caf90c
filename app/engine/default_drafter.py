"""Decides whether a model drafts for itself where nobody said anything of drafts.

A checkpoint with a layer for multi-token prediction (DeepSeek-V3, GLM-4.5, Qwen 3.5) does: tokens stay what they are,
and the number of drafts follows what they cost, none of them included. `speculative_config`, a null too, is the user's
word. A start that the layer is in the way of, by its memory or its tensors, goes on without it.
"""

from __future__ import annotations

import logging

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.mtp_layer import missing_of_mtp, promises_mtp
from app.config.engine import EngineConfig
from app.config.speculative import SpeculativeConfig
from app.engine.executor import create_executor
from app.engine.executor.base import Executor
from app.errors import CheckpointError, ConfigError
from app.records.worker_info import WorkerInfo

logger = logging.getLogger("manta.engine")


def with_default_drafter(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """`config` of the model `info`, with `mtp` where the checkpoint has all that it reads and no option is in its way;
    one line of the log says so, or why not."""
    if "speculative_config" in config.model_fields_set or not promises_mtp(info, by_default=True):
        return config
    if (reason := _obstacle(config, info)) is not None:
        logger.info("speculative_config: the model's layer for multi-token prediction stays unused: %s", reason)
        return config
    logger.info(
        "speculative_config: method mtp, by the model's own layer for multi-token prediction; null turns it off"
    )
    return config.model_copy(update={"speculative_config": SpeculativeConfig(method="mtp")})


def start_workers(
    executor: Executor, config: EngineConfig, without: EngineConfig
) -> tuple[Executor, EngineConfig, WorkerInfo]:
    """Start the executor of `config`; where that fails and nobody asked for its drafter, another one's of the options
    that were given. Returns what runs."""
    try:
        return executor, config, executor.start()
    except (CheckpointError, ConfigError) as error:
        if config.speculative_config == without.speculative_config:
            raise
        reason = str(error)
    logger.warning("speculative_config: the start goes on without the model's own drafter: %s", reason)
    executor.shutdown()
    executor = create_executor(without)
    try:
        return executor, without, executor.start()
    except BaseException:
        executor.shutdown()
        raise


def _obstacle(config: EngineConfig, info: ModelInfo) -> str | None:
    """Returns what a drafter of the model's own would be refused for, by the option's name, or what it lacks."""
    if info.runner(config.runner) != "generate":
        return f"runner={config.runner}: a pooling model generates nothing"
    if info.impl == "transformers":
        return "model_impl=transformers runs the model's layers by itself"
    if config.is_exact:
        return f"deterministic={config.deterministic}: a drafter of its own was not shown to leave logits exact"
    if config.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size={config.pipeline_parallel_size}: the last stage would hold the embedding again"
    return missing_of_mtp(info, config.load_format)
