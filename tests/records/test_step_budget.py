"""Most tokens in a step: an encoder's follow its context and its device, unless somebody says."""

from __future__ import annotations

from typing import Any

import pytest

from app.checkpoints.model_info import ASSETS, ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.records.step_budget import ENCODER_STEP_TOKENS, step_budget, whole_prompts
from tests.tiny_encoders import tiny_encoder


def test_an_encoder_has_as_many_as_keep_the_device_busy() -> None:
    directory = str(tiny_encoder("bert"))
    encoder, usual = ModelInfo.from_directory(directory), EngineConfig(model=directory)
    assert step_budget(usual, encoder, 512) == 2048
    assert step_budget(usual, encoder, 4096) == 4096
    assert step_budget(usual, encoder, 512, on_gpu=True) == ENCODER_STEP_TOKENS
    assert step_budget(usual, encoder, 16_384, on_gpu=True) == 16_384
    given = EngineConfig(model=directory, max_num_batched_tokens=1024)
    assert step_budget(given, encoder, 512, on_gpu=True) == 1024
    with pytest.raises(ConfigError, match="max_model_len=2048: a prompt is computed in one step"):
        step_budget(given, encoder, 2048)


def test_a_decoder_computes_prompts_whole_where_nothing_is_kept_of_them() -> None:
    directory = str(tiny_encoder("qwen3"))
    decoder = ModelInfo.from_directory(directory)

    def one_pass(max_model_len: int, **options: Any) -> bool:
        options = {"runner": "pooling", "enable_prefix_caching": False, **options}
        return whole_prompts(EngineConfig(model=directory, **options), decoder, max_model_len)

    assert one_pass(512)
    assert one_pass(ENCODER_STEP_TOKENS)
    assert not one_pass(ENCODER_STEP_TOKENS + 1)
    assert not one_pass(512, max_num_batched_tokens=256)
    assert not one_pass(512, enable_prefix_caching=True)
    assert not one_pass(512, kv_cache_dtype="fp8")
    assert not one_pass(512, deterministic="batch")
    assert not one_pass(512, runner="generate")
    config = EngineConfig(model=directory, runner="pooling", enable_prefix_caching=False)
    assert step_budget(config, decoder, 4096) == 4096
    assert step_budget(config, decoder, 512, on_gpu=True) == ENCODER_STEP_TOKENS


def test_a_decoder_has_what_is_configured() -> None:
    directory = str(ASSETS / "tiny-chat")
    decoder = ModelInfo.from_directory(directory)
    assert step_budget(EngineConfig(model=directory), decoder, 4096, on_gpu=True) == 2048
