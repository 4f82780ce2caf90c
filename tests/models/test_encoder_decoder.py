"""A model with an encoder finds its own layers that attend to it, and tells its tensors from the decoder's."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.models.encoder_decoder import EncoderDecoder, encoder_info
from tests.tiny_sounds import tiny_whisper
from tests.worker.worker_driver import Driver


def test_layers_and_names() -> None:
    driver = Driver(str(tiny_whisper()), num_blocks=8, max_num_seqs=2)
    assert driver.worker._parts is not None
    model = driver.worker._parts.model
    assert isinstance(model, EncoderDecoder)
    assert [layer.layer_index for layer in model.cross_layers] == [1, 3]
    names = {
        "model.encoder.layers.2.fc1.bias": "encoder.tower.layers.2.mlp.fc1.bias",
        "encoder.conv1.weight": "encoder.tower.conv1.weight",
        "model.decoder.layers.1.encoder_attn.out_proj.bias": "model.layers.1.encoder_attn.o_proj.bias",
        "model.decoder.layer_norm.weight": "model.norm.weight",
    }
    for name, own in names.items():
        assert [found for found, _ in model.own_tensors(name, None)] == [own]  # type: ignore[arg-type]
    driver.worker.shutdown()


def test_an_encoder_that_nobody_knows_is_refused() -> None:
    info = ModelInfo(Path("x"), {"model_type": "other", "architectures": ["Other"]}, {})
    with pytest.raises(UnsupportedError, match="Other: nothing is known of its encoder"):
        encoder_info(info)
