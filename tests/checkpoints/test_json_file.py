"""JSON files are read within a bound, and what is none is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints import json_file
from app.checkpoints.json_file import read_json, read_object
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.weight_files import weight_map
from app.errors import CheckpointError
from app.text.tokenizer import read_json as read_tokenizer_json

READERS: list[Callable[[Path], Any]] = [
    read_json,
    read_object,
    weight_map,
    read_tokenizer_json,
    lambda file: ModelInfo.from_directory(str(file.parent)),
]


@pytest.mark.parametrize("read", READERS)
def test_a_file_larger_than_any_is_not_read(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "MOST_BYTES", 1 << 20)
    file = tmp_path / "config.json"
    file.write_text(" " * (1 << 20) + "{}")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: it has more than 1 MiB"):
        read(file)


def test_what_is_no_object_is_named(tmp_path: Path) -> None:
    file = tmp_path / "modules.json"
    assert read_object(file, optional=True) == {}
    with pytest.raises(CheckpointError, match=r"cannot read .*No such file"):
        read_object(file)
    file.write_text("[1]")
    assert read_json(file) == [1]
    with pytest.raises(CheckpointError, match=r"modules\.json is not a JSON object"):
        read_object(file, optional=True)
