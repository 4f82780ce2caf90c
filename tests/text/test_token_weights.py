"""Weights of tokens as a sparse vector."""

from __future__ import annotations

import numpy as np

from app.text.token_weights import token_weights
from app.text.tokenizer import Tokenizer
from tests.tiny_encoders import tiny_encoder


def test_the_largest_of_each_token_counts() -> None:
    tokenizer = Tokenizer.from_directory(tiny_encoder("xlm-roberta"))
    begin, end = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    assert begin is not None
    assert end is not None
    weights = np.array([9, 1, 0, 3, 2, 9], dtype=np.float32)
    assert token_weights(tokenizer, [begin, 40, 30, 20, 40, end], weights) == {20: 3.0, 40: 2.0}
