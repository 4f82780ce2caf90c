"""Tokens that a checkpoint's files add to its vocabulary, by their texts. No torch (I8)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from app.checkpoints.json_file import read_object
from app.errors import CheckpointError


def added_token_id(directory: str | Path, text: str) -> int:
    """Id of a token, for models whose config.json does not say it; CheckpointError where no file names the token."""
    found = _added(str(directory)).get(text)
    if found is None:
        raise CheckpointError(f"{directory}: its tokenizer's files name no token {text!r}", param="model")
    return found


@lru_cache(maxsize=16)
def _added(directory: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in _list(_file(directory, "tokenizer.json").get("added_tokens")):
        _note(found, entry.get("content"), entry.get("id"))
    decoder = _file(directory, "tokenizer_config.json").get("added_tokens_decoder")
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else ():
        _note(found, entry.get("content") if isinstance(entry, dict) else None, token_id)
    for content, token_id in _file(directory, "added_tokens.json").items():
        _note(found, content, token_id)
    return found


def _file(directory: str, name: str) -> dict[str, Any]:
    return read_object(Path(directory) / name, optional=True)


def _list(entries: Any) -> list[dict[str, Any]]:
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _note(found: dict[str, int], text: Any, token_id: Any) -> None:
    if isinstance(text, str) and str(token_id).isdecimal():
        found[text] = int(token_id)
