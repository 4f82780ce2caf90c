"""Most tokens in a step: an encoder's follow its context and its device, unless somebody says."""

from __future__ import annotations

import pytest

from app.checkpoints.model_info import ASSETS, ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.records.pooling_info import ENCODER_STEP_TOKENS, step_budget
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
    with pytest.raises(ConfigError, match="max_model_len=2048: an encoder computes a prompt in one step"):
        step_budget(given, encoder, 2048)


def test_a_decoder_has_what_is_configured() -> None:
    directory = str(ASSETS / "tiny-chat")
    decoder = ModelInfo.from_directory(directory)
    assert step_budget(EngineConfig(model=directory), decoder, 4096, on_gpu=True) == 2048
