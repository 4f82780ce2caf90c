"""What config.json and generation_config.json say together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.json_file import read_object
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.weight_files import weight_map
from app.errors import CheckpointError
from app.text.tokenizer import read_json


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_answers_end_with_what_either_file_says(
    config: dict[str, Any], generation: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert ModelInfo(Path(), {"vocab_size": 9, **config}, generation).eos_token_ids == ends


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("scheme", ["awq", 4, True, [["bits", 4]]])
def test_a_scheme_that_is_no_object_is_named(name: str, scheme: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} is .*, not an object"):
        _ = ModelInfo(Path(), {name: scheme}, {}).quantization_scheme


@pytest.mark.parametrize("content", [b'{"a":' * 100_000, b"\xff"], ids=["deep", "binary"])
def test_files_that_nobody_can_parse_are_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    readers = (lambda _: ModelInfo.from_directory(str(tmp_path)), read_json, read_object, weight_map)
    for read in readers:
        with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
            read(file)
