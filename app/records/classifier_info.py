"""Reads how a model directory says what a classifier, scorer or reward model answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from app.checkpoints.fields.kinds import check
from app.checkpoints.fields.pooling_json import PROMPT_FIELDS
from app.checkpoints.json_file import read_object
from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.records.pooling_params import PoolingTask

Scores = Literal["sigmoid", "softmax", "identity"]

_CLASSIFIER_POOLINGS = {"cls": "cls", "bos": "cls", "mean": "mean", "late": "mean"}
_SCORES: dict[str, Scores] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_PROBLEMS: dict[str, Scores] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def classifier_pooling(hf: dict[str, Any]) -> str:
    """Tells what an encoder's classifier reads: the first token, unless `classifier_pooling` says otherwise (`late`:
    the mean of what the head's first layer gave)."""
    given = str(hf.get("classifier_pooling", "late" if hf.get("model_type") == "eurobert" else "cls"))
    if given not in _CLASSIFIER_POOLINGS:
        raise UnsupportedError(f"classifier_pooling={given!r} is not supported", param="model")
    return _CLASSIFIER_POOLINGS[given]


def labels_of(hf: dict[str, Any]) -> tuple[str, ...]:
    """Names the classes. transformers writes `id2label`, and means two where it writes nothing."""
    named = hf.get("id2label") or {}
    number = len(named) or int(hf.get("num_labels") or 2)
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(number))


def rewards(info: ModelInfo) -> dict[str, Any]:
    """Describes a reward model: a number for the text (Qwen2.5-Math-RM), or for each token whether a step ending there
    is bad or good (PRM)."""
    of_steps = info.architecture.endswith("ForProcessRewardModel")
    hf = {"num_labels": 2 if of_steps else 1, **info.hf_config}
    tasks: tuple[PoolingTask, ...] = ("token_classify", "classify") if of_steps else ("classify", "token_classify")
    return {"tasks": tasks, "labels": labels_of(hf), "scores": "softmax" if of_steps else "identity"}


def scores_of(hf: dict[str, Any], num_labels: int, packed: Path | None = None) -> Scores:
    """Tells what scores are: as sentence-transformers wrote it down (in the directory `packed`, too), else by the kind
    of problem or the number of classes."""
    own = (hf.get("sentence_transformers") or {}).get("activation_fn") or hf.get("sbert_ce_default_activation_function")
    if own is None and packed is not None:
        file = packed / "config_sentence_transformers.json"
        given = read_object(file, optional=True)
        check(given, PROMPT_FIELDS, str(file))
        own = given.get("activation_fn")
    if own:
        name = str(own).rpartition(".")[2]
        if name not in _SCORES:
            raise UnsupportedError(f"the classifier's activation {own!r} is not supported", param="model")
        return _SCORES[name]
    problem = hf.get("problem_type")
    if problem in _PROBLEMS:
        return _PROBLEMS[problem]
    return "sigmoid" if num_labels == 1 else "softmax"
