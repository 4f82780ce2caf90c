"""What config.json and generation_config.json say together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.engine.model_info import ModelInfo


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
    assert ModelInfo(Path(), config, generation).eos_token_ids == ends
