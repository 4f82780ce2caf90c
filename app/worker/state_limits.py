"""Says what does not go with layers that keep states, before a start takes memory for them."""

from __future__ import annotations

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.worker.attention.kv_cache import KVCacheSpec
from app.worker.device import DTYPES


def refuse_with_states(config: EngineConfig, spec: KVCacheSpec) -> None:
    """ConfigError names the option that a model with states, or a stage without anything kept, cannot have."""
    if not spec.states and not spec.layers:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: a stage has layers that neither attend nor keep "
            "states alone; take another number of stages",
            param="pipeline_parallel_size",
        )
    refuse_state_dtype(config, spec)
    if not spec.states:
        return
    drafts = config.speculative_config
    if drafts is not None and drafts.method == "draft_model":
        raise ConfigError(
            "speculative_config: layers of this model, or of its draft model, keep recurrent states; method "
            "draft_model computes a step's tokens again, which would go through the states twice; take another method",
            param="speculative_config",
        )
    if spec.layers:  # what is kept of states lies in blocks, which connectors know how to move
        return
    if config.kv_connector != EngineConfig.model_fields["kv_connector"].default:
        raise ConfigError(
            f"kv_connector={config.kv_connector}: this model's layers keep recurrent states alone, and no blocks that "
            "a connector could move; leave it out",
            param="kv_connector",
        )
    if config.kv_host_memory_bytes:
        raise ConfigError(
            f"kv_host_memory_bytes={config.kv_host_memory_bytes}: this model's layers keep recurrent states alone, and "
            "no blocks that the host's memory could take in; leave it out",
            param="kv_host_memory_bytes",
        )


def refuse_state_dtype(config: EngineConfig, spec: KVCacheSpec) -> None:
    """ConfigError where a type is asked for that no state has. A stage of a pipeline may have other layers alone."""
    asked = config.recurrent_state_dtype
    kinds = {tensor.dtype for layer in spec.states if layer is not None for tensor in layer.tensors}
    if asked != "auto" and config.pipeline_parallel_size == 1 and DTYPES[asked] not in kinds:
        raise ConfigError(
            f"recurrent_state_dtype={asked}: this model's layers keep no recurrent states; leave it out",
            param="recurrent_state_dtype",
        )
