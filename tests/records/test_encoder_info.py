"""What an encoder takes is read from config.json; another input is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.checkpoints.model_info import ModelInfo
from app.errors import InvalidRequestError
from app.records.encoder_info import EncoderInfo
from app.records.encoder_input import EncoderInput
from app.records.request_bounds import RequestBounds

WHISPER = {"model_type": "whisper", "num_mel_bins": 4, "max_source_positions": 3}


def test_a_sound_has_one_shape() -> None:
    info = EncoderInfo.of(ModelInfo(Path("x"), WHISPER, {}))
    assert info == EncoderInfo("audio", 3, (4, 6))
    given = EncoderInput("audio", b"d" * 16, 3, (4, 6), bytes(96))
    info.check(given)
    assert given.array().shape == (4, 6)
    with pytest.raises(InvalidRequestError, match=r"has 2 positions and shape \[4, 4\], not 3 and \[4, 6\]"):
        info.check(EncoderInput("audio", b"d" * 16, 2, (4, 4), bytes(64)))


def test_a_decoder_alone_has_none() -> None:
    assert EncoderInfo.of(ModelInfo(Path("x"), {"model_type": "llama"}, {})) is None


def test_bounds_with_another_encoder_are_others() -> None:
    encoders = (None, EncoderInfo("text", 3, start=(2,)), EncoderInfo("text", 3, start=(2, 0)))
    assert len({RequestBounds(100, (2,), 50, encoder=one).mark for one in encoders}) == 3
