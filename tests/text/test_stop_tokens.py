"""The tokenizer's end of sequence ends an answer even where config.json does not know it."""

from __future__ import annotations

from pathlib import Path

from app.records.sampling_params import SamplingParams
from app.text.stop_tokens import with_tokenizer_eos
from app.text.tokenizer import Tokenizer


def test_the_tokenizer_s_eos_is_added_once(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_directory(directories["byte_level"])
    eos = tokenizer.eos_token_id
    assert eos is not None
    params = SamplingParams(stop_token_ids=(7,))
    assert with_tokenizer_eos(params, tokenizer, (0,), eos + 1).stop_token_ids == (7, eos)
    assert with_tokenizer_eos(params, tokenizer, (0, eos), eos + 1) is params
    known = SamplingParams(stop_token_ids=(eos,))
    assert with_tokenizer_eos(known, tokenizer, (), eos + 1) is known
    ignoring = SamplingParams(ignore_eos=True)
    assert with_tokenizer_eos(ignoring, tokenizer, (), eos + 1) is ignoring


def test_an_eos_that_the_model_lacks_is_left_out(directories: dict[str, Path]) -> None:
    """Every request would be refused for it."""
    tokenizer = Tokenizer.from_directory(directories["byte_level"])
    params = SamplingParams()
    assert tokenizer.eos_token_id is not None
    assert with_tokenizer_eos(params, tokenizer, (), tokenizer.eos_token_id) is params
