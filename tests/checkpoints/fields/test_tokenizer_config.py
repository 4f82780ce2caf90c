"""Tokens that are none, and ids that no table could hold, are named; what models are published with is taken."""

from __future__ import annotations

from typing import Any

import pytest

from app.checkpoints.fields.tokenizer_config import check_tokenizer_config, check_vocabulary
from app.errors import CheckpointError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eos_token": 5}, "eos_token is 5, not a token: a text"),
        ({"eos_token": {}}, "eos_token is {}, not a token"),
        ({"bos_token": {"content": ["a"]}}, "bos_token is .*, not a token"),
        ({"extra_special_tokens": 5}, "extra_special_tokens is 5, not a list"),
        ({"extra_special_tokens": [5]}, r"extra_special_tokens is \[5\], not a list"),
        ({"additional_special_tokens": {"a": [1]}}, "additional_special_tokens is .*, nor an object of tokens"),
        ({"added_tokens_decoder": ["<a>"]}, "added_tokens_decoder is .*, not an object of tokens with their content"),
        ({"added_tokens_decoder": {"x": {"content": "<a>"}}}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": {"1": "<a>"}}, "added_tokens_decoder is"),
    ],
)
def test_tokens_that_are_none_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^t\.json is not usable: {message}"):
        check_tokenizer_config(wrong, "t.json")


def test_ids_that_no_table_could_hold_are_named() -> None:
    check_vocabulary({}, "t.json")
    check_vocabulary({"a": 0, "b": 262_208}, "t.json")
    with pytest.raises(CheckpointError, match=r"t\.json is not usable: it has a token id 4000000000, not below"):
        check_vocabulary({"a": 0, "b": 4_000_000_000}, "t.json")


def test_what_models_are_published_with_is_taken() -> None:
    token = {"content": "</s>", "lstrip": False, "normalized": False, "special": True}
    check_tokenizer_config({"eos_token": token, "bos_token": "<s>", "pad_token": None}, "t.json")
    check_tokenizer_config({"added_tokens_decoder": {"2": token}, "extra_special_tokens": {"image": "<i>"}}, "t.json")
    check_tokenizer_config({"additional_special_tokens": ["<a>", token], "extra_special_tokens": []}, "t.json")
