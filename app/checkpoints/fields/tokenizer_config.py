"""The fields of tokenizer_config.json that are read, and what ids of a vocabulary may be. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.fields.kinds import Kind, check, either, several
from app.errors import CheckpointError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MOST_TOKENS = 1 << 22  # tables have a place for each id; the largest vocabularies have 2^18
_MOST_ADDED = 1 << 17


def _is_token(value: Any) -> bool:
    content = value.get("content") if isinstance(value, Mapping) else value
    return isinstance(content, str) and len(content) < 1 << 12


def _are_by_id(value: Any) -> bool:
    if not isinstance(value, Mapping) or len(value) > _MOST_ADDED:
        return False
    return all(key.isdecimal() and len(key) < 8 and _is_described(token) for key, token in value.items())


def _is_described(value: Any) -> bool:
    return isinstance(value, Mapping) and _is_token(value)


def _are_by_name(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) <= _MOST_ADDED and all(map(_is_token, value.values()))


_TOKEN = Kind("a token: a text, or an object with its content", _is_token)
_SEVERAL = either(several(_TOKEN, _MOST_ADDED), Kind("an object of tokens", _are_by_name))
_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(SPECIAL_TOKENS, _TOKEN),
    **dict.fromkeys(("extra_special_tokens", "additional_special_tokens"), _SEVERAL),
    "added_tokens_decoder": Kind("an object of tokens with their content, by id", _are_by_id),
}


def check_tokenizer_config(config: Mapping[str, Any], file: str) -> None:
    """CheckpointError names a field that holds something else."""
    check(config, _FIELDS, file)


def check_vocabulary(vocabulary: Mapping[str, int], file: str) -> None:
    """CheckpointError where an id is so large that a table of all would not fit into memory."""
    largest = max(vocabulary.values(), default=0)
    if largest >= MOST_TOKENS:
        raise CheckpointError(f"{file} is not usable: it has a token id {largest}, not below {MOST_TOKENS:,}")
