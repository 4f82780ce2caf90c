"""The weights that a model gives to the tokens of a text, as a sparse vector over the vocabulary (BGE-M3)."""

from __future__ import annotations

from collections.abc import Sequence

from app.records.step import Float32Array
from app.text.tokenizer import Tokenizer

TokenWeights = dict[int, float]
_LEFT_OUT = ("cls_token", "bos_token", "eos_token", "sep_token", "pad_token", "unk_token")


def token_weights(tokenizer: Tokenizer, token_ids: Sequence[int], weights: Float32Array) -> TokenWeights:
    """The largest weight of each token of a text [T], by token id, in their order; special tokens and what is 0 have
    none."""
    named = (tokenizer.special_tokens.get(name) for name in _LEFT_OUT)
    special = {tokenizer.token_to_id(token) for token in named if token is not None}
    found: TokenWeights = {}
    for token, weight in zip(token_ids, weights.tolist(), strict=True):
        if weight > 0 and token not in special:
            found[token] = max(weight, found.get(token, 0.0))
    return dict(sorted(found.items()))
