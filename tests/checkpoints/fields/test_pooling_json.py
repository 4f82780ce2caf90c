"""Modules of sentence-transformers stay in their directory, and have sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.fields.kinds import check
from app.checkpoints.fields.pooling_json import DENSE_FIELDS, MODULES, POOLING_FIELDS, PROMPT_FIELDS
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.records.pooling_info import PoolingInfo

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}


@pytest.mark.parametrize(
    "modules",
    [
        {},
        [5],
        [{"path": ""}],
        [{"type": "Dense", "path": "../other"}],
        [{"type": "Dense", "path": "/etc"}],
        [TRANSFORMER] * 65,
    ],
)
def test_modules_that_are_none_or_lie_elsewhere_are_refused(modules: Any, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    info = ModelInfo(tmp_path, {"architectures": ["BertModel"], "hidden_size": 8}, {})
    with pytest.raises(CheckpointError, match=r"modules\.json is .*, not a list of at most 64"):
        PoolingInfo.of(info)


@pytest.mark.parametrize("wrong", [True, 0, 1 << 31, "8", 8.5])
def test_sizes_of_dense_modules(wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="f is not usable: out_features is"):
        check({"in_features": 8, "out_features": wrong}, DENSE_FIELDS, "f")
    with pytest.raises(CheckpointError, match="f is not usable: bias is 'no', not true or false"):
        check({"bias": "no"}, DENSE_FIELDS, "f")


@pytest.mark.parametrize("wrong", [{"prompts": ["a"]}, {"prompts": {"a": 1}}, {"default_prompt_name": 3}])
def test_prompts_are_names_and_texts(wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="f is not usable"):
        check(wrong, PROMPT_FIELDS, "f")


def test_what_models_are_published_with_is_taken() -> None:
    assert MODULES.holds([TRANSFORMER, {"idx": 1, "name": "1", "path": "1_Pooling", "type": "a.Pooling"}])
    check({"pooling_mode": "mean"}, POOLING_FIELDS, "f")
    check({"pooling_mode": ["cls"]}, POOLING_FIELDS, "f")
