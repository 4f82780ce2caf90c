"""Decides how many tokens a step takes, and whether it computes prompts whole."""

from __future__ import annotations

from app.checkpoints.encoder_types import ONE_PASS_DECODERS
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError

ENCODER_STEP_TOKENS = 8192  # on a GPU: of 2,048 it is done before the host has the next step ready


def whole_prompts(config: EngineConfig, info: ModelInfo, max_model_len: int) -> bool:
    """True if each prompt is computed in one step and nothing is cached: an encoder's, and a plain decoder's where it
    pools, prefixes are not kept, and the longest prompt fits in a step."""
    if not info.is_causal:
        return True
    if str(info.hf_config.get("model_type")) not in ONE_PASS_DECODERS or info.runner(config.runner) != "pooling":
        return False
    is_given = "max_num_batched_tokens" in config.model_fields_set
    most = config.max_num_batched_tokens if is_given else max(config.max_num_batched_tokens, ENCODER_STEP_TOKENS)
    is_cached = config.enable_prefix_caching or config.kv_cache_dtype != "auto" or config.is_exact
    return not is_cached and max_model_len <= most


def step_budget(config: EngineConfig, info: ModelInfo, max_model_len: int, *, on_gpu: bool = False) -> int:
    """Most tokens in one step: where prompts are computed whole, the longest must fit, so the default grows with the
    context, and on a GPU to what keeps that busy.

    ConfigError when the number was given and is too small.
    """
    given = config.max_num_batched_tokens
    if not whole_prompts(config, info, max_model_len):
        return given
    if "max_num_batched_tokens" not in config.model_fields_set:
        return max(given, max_model_len, ENCODER_STEP_TOKENS if on_gpu else 0)
    if given < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={given} is less than max_model_len={max_model_len}: a prompt is computed in "
            "one step",
            param="max_num_batched_tokens",
        )
    return given
