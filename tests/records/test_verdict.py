"""Which tokens' logits are a score: as sentence-transformers packs it, and by config.json. The scores themselves:
tests/api/pooling/test_verdicts.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, UnsupportedError
from app.records.verdict import Verdict, configured_verdict, packed_verdict


def info(path: Path, **config: Any) -> ModelInfo:
    vocabulary = {"model": {"vocab": {"yes": 7, "no": 9, "far": 100}}}
    (path / "tokenizer.json").write_text(json.dumps(vocabulary))
    return ModelInfo(path, {"vocab_size": 20, **config}, {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"true_token_id": 7, "false_token_id": 9}, Verdict(7, 9)),
        ({"true_token_id": 7, "false_token_id": None, "module_input_name": "causal_logits"}, Verdict(7)),
    ],
)
def test_packed(tmp_path: Path, given: dict[str, Any], expected: Verdict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert packed_verdict(tmp_path, info(tmp_path)) == expected


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"false_token_id": 9}, CheckpointError),
        ({"true_token_id": 20}, CheckpointError),
        ({"true_token_id": 7, "false_token_id": 21}, CheckpointError),
        ({"true_token_id": "7"}, CheckpointError),
        ({"true_token_id": 7, "module_input_name": "scores"}, UnsupportedError),
    ],
)
def test_packed_wrongly(tmp_path: Path, given: dict[str, Any], error: type[Exception]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(error):
        packed_verdict(tmp_path, info(tmp_path))


def test_configured(tmp_path: Path) -> None:
    assert configured_verdict(info(tmp_path)) is None
    both = info(tmp_path, classifier_from_token=["no", "yes"], is_original_qwen3_reranker=True)
    assert configured_verdict(both) == Verdict(7, 9, asked="qwen3")
    assert configured_verdict(info(tmp_path, classifier_from_token=["yes"])) == Verdict(7)
    for token in ("perhaps", "far"):
        with pytest.raises(CheckpointError, match="is no token"):
            configured_verdict(info(tmp_path, classifier_from_token=[token]))
    with pytest.raises(UnsupportedError, match="of 1 tokens"):
        configured_verdict(info(tmp_path, classifier_from_token=["yes"], method="from_2_way_softmax"))
