"""What an encoder takes is read from config.json; another input is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.checkpoints.model_info import ModelInfo
from app.errors import InvalidRequestError, UnsupportedError
from app.records.encoder_info import EncoderInfo
from app.records.encoder_input import EncoderInput, encoder_input_of
from app.records.request import EngineRequest, Placement
from app.records.request_bounds import RequestBounds
from app.records.sampling_params import SamplingParams

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


def test_a_text_is_its_tenant_s_own() -> None:
    info = EncoderInfo("text", 4, start=(2,))
    digests = [info.of_text(text, root).digest for text in ([1, 2], [1, 3]) for root in (b"", b"a", b"b")]
    assert len(set(digests)) == 6
    assert info.of_text([1, 2], b"a").digest == digests[1]
    settled = [
        RequestBounds(100, (2,), 50, encoder=info).settle(EngineRequest("r", [1, 2], SamplingParams(), placement=place))
        for place in (Placement(cache_root=b"a"), Placement(cache_root=b"b"))
    ]
    assert [encoder_input_of(one.asks).digest for one in settled] == digests[1:3]  # type: ignore[union-attr]


def test_clients_prompts_are_what_the_encoder_reads() -> None:
    bounds = RequestBounds(100, (2,), 50, encoder=EncoderInfo("text", 4, start=(2, 0)))
    request = bounds.settle(EngineRequest("r", [5, 6, 7], SamplingParams()))
    assert (request.prompt_token_ids, request.client_token_ids, request.num_client_tokens) == ([2, 0], [5, 6, 7], 3)
    plain = EngineRequest("r", [5, 6], SamplingParams())
    assert (plain.client_token_ids, plain.num_client_tokens) == ([5, 6], 2)
    heard = replace(plain, asks=(EncoderInput("audio", b"d" * 16, 3, (4, 6), bytes(96)),))
    assert (heard.client_token_ids, heard.num_client_tokens) == ([5, 6], 2)
    with pytest.raises(UnsupportedError, match="prompt_logprobs: the model's encoder reads the prompt"):
        bounds.settle(EngineRequest("r", [5], SamplingParams(prompt_logprobs=0)))


def test_bounds_with_another_encoder_are_others() -> None:
    encoders = (None, EncoderInfo("text", 3, start=(2,)), EncoderInfo("text", 3, start=(2, 0)))
    assert len({RequestBounds(100, (2,), 50, encoder=one).mark for one in encoders}) == 3
