"""The tokenizer's end of sequence ends an answer even where config.json does not know it."""

from __future__ import annotations

from pathlib import Path

from app.engine.sampling_params import SamplingParams
from app.text.stop_tokens import with_tokenizer_eos
from app.text.tokenizer import Tokenizer


def test_the_tokenizer_s_eos_is_added_once(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_directory(directories["byte_level"])
    eos = tokenizer.eos_token_id
    assert eos is not None
    params = SamplingParams(stop_token_ids=(7,))
    assert with_tokenizer_eos(params, tokenizer, (0,)).stop_token_ids == (7, eos)
    assert with_tokenizer_eos(params, tokenizer, (0, eos)) is params
    known = SamplingParams(stop_token_ids=(eos,))
    assert with_tokenizer_eos(known, tokenizer, ()) is known
    ignoring = SamplingParams(ignore_eos=True)
    assert with_tokenizer_eos(ignoring, tokenizer, ()) is ignoring
