"""Texts and pairs with special tokens, cut to length; transformers' fast tokenizers are the judge."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from app.errors import InvalidRequestError
from app.text.pooling_prompt import TextPair, pooling_prompts
from app.text.tokenizer import Tokenizer
from tests.tiny_encoders import texts, tiny_encoder

PAIRS: list[TextPair] = [
    *((text, None) for text in texts(6, 20)),
    *zip(texts(6, 20, seed=1), texts(6, 20, seed=2), strict=True),
    ("", "fox"),
    ("same", "same"),
]


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "qwen3"])
@pytest.mark.parametrize("limit", [None, 6, 12, 13, 40])
def test_as_transformers_does_it(family: str, limit: int | None) -> None:
    directory = tiny_encoder(family)
    reference = AutoTokenizer.from_pretrained(directory)
    found = pooling_prompts(Tokenizer.from_directory(directory), PAIRS, limit)
    how = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
    for (first, second), prompt in zip(PAIRS, found, strict=True):
        expected = reference(first, second, return_token_type_ids=True, **how)
        assert prompt.token_ids == expected["input_ids"]
        types = expected["token_type_ids"]
        assert prompt.second_text_at == (types.index(1) if 1 in types else None)


def test_the_last_text_alone_can_be_cut() -> None:
    tokenizer = Tokenizer.from_directory(tiny_encoder("bert"))
    whole, cut = (pooling_prompts(tokenizer, [("a fox", "the lazy dog")], None, most)[0] for most in (None, 1))
    assert cut.token_ids == [*whole.token_ids[: len(cut.token_ids) - 1], whole.token_ids[-1]]
    assert cut.token_ids.count(whole.token_ids[-1]) == 2  # both separators are there


def test_no_room_beside_the_special_tokens() -> None:
    tokenizer = Tokenizer.from_directory(tiny_encoder("bert"))
    with pytest.raises(InvalidRequestError) as caught:
        pooling_prompts(tokenizer, [("a fox", None)], 2)
    assert caught.value.param == "truncate_prompt_tokens"
