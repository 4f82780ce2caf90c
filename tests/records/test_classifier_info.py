"""Classifiers' pooling, classes and scores, as a model directory says them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import UnsupportedError
from app.records.classifier_info import classifier_pooling, labels_of, scores_of


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        ({}, "cls"),
        ({"model_type": "eurobert"}, "mean"),
        ({"classifier_pooling": "bos"}, "cls"),
        ({"classifier_pooling": "mean"}, "mean"),
    ],
)
def test_what_a_classifier_reads(hf: dict[str, Any], expected: str) -> None:
    assert classifier_pooling(hf) == expected


def test_a_pooling_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="classifier_pooling='max'"):
        classifier_pooling({"classifier_pooling": "max"})


def test_classes_are_named_in_their_order() -> None:
    assert labels_of({}) == ("LABEL_0", "LABEL_1")
    assert labels_of({"id2label": {"1": "b", "0": "a"}}) == ("a", "b")
    assert labels_of({"num_labels": 1}) == ("LABEL_0",)


def test_scores(tmp_path: Path) -> None:
    assert scores_of({}, 1) == "sigmoid"
    assert scores_of({}, 3) == "softmax"
    assert scores_of({"problem_type": "regression"}, 1) == "identity"
    assert scores_of({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1) == "identity"
    settings = {"activation_fn": "torch.nn.modules.activation.Softmax"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert scores_of({}, 1, tmp_path) == "softmax"
    with pytest.raises(UnsupportedError, match="activation"):
        scores_of({"sbert_ce_default_activation_function": "torch.nn.Tanh"}, 1)
