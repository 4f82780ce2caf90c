"""Token ids that end an answer, where the model's configuration and its tokenizer disagree about them."""

from __future__ import annotations

from collections.abc import Sequence

from app.records.sampling_params import SamplingParams
from app.text.tokenizer import Tokenizer


def with_tokenizer_eos(
    params: SamplingParams, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int
) -> SamplingParams:
    """`params` that also stop at the tokenizer's end-of-sequence token.

    Fine-tuned chat models often leave the base model's `eos_token_ids` in config.json and name the end of a turn only
    in tokenizer_config.json; the engine sees no tokenizer (I4), so it is told by way of `stop_token_ids`.
    A token that the model's vocabulary lacks ends nothing: the model cannot write it.
    """
    eos = tokenizer.eos_token_id
    if eos is None or eos >= vocab_size or params.ignore_eos or eos in eos_token_ids or eos in params.stop_token_ids:
        return params
    return params.model_copy(update={"stop_token_ids": (*params.stop_token_ids, eos)})
