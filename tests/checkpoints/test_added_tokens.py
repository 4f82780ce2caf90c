"""Tokens added to a vocabulary, found by their texts in each file that may name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.added_tokens import added_token_id
from app.errors import CheckpointError

FILES: list[tuple[str, Any]] = [
    ("added_tokens.json", {"<IMG_CONTEXT>": 92_546}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"92546": {"content": "<IMG_CONTEXT>"}, "3": None}}),
    ("tokenizer.json", {"added_tokens": [{"id": 92_546, "content": "<IMG_CONTEXT>"}, 7]}),
]


@pytest.mark.parametrize(("name", "content"), FILES)
def test_each_file_is_read(name: str, content: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    assert added_token_id(tmp_path, "<IMG_CONTEXT>") == 92_546
    with pytest.raises(CheckpointError, match="name no token '<image>'"):
        added_token_id(tmp_path, "<image>")


def test_files_of_another_form_name_nothing(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text('{"<IMG_CONTEXT>": "many"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": {}}')
    with pytest.raises(CheckpointError, match="name no token"):
        added_token_id(tmp_path, "<IMG_CONTEXT>")
