"""Sampling defaults and ends of answers that no request could use are told at the start, by file and field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ASSETS
from app.config.engine import EngineConfig
from app.errors import CheckpointError
from app.models.generation_json import check_generation
from app.models.model_check import check_model

FILE = r"generation_config\.json is not usable: "


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The description of the built-in model, without weights."""
    for file in ASSETS.joinpath("tiny-chat").glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


def write(file: Path, changes: dict[str, Any]) -> None:
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**found, **changes}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": "0.7"}, "temperature is '0.7'"),
        ({"temperature": -1}, "temperature is -1: .*greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": 1 << 70}, "top_k is 11805916207"),
        ({"top_p": 0}, "top_p is 0: .*greater than 0"),
        ({"top_p": 7}, "top_p is 7"),
        ({"min_p": 3}, "min_p is 3"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": -2}, "repetition_penalty is -2"),
        ({"max_new_tokens": "many"}, "max_new_tokens is 'many', not a whole number"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', not a token id below vocab_size="),
        ({"eos_token_id": ["a"]}, "eos_token_id is"),
        ({"eos_token_id": [[1]]}, "eos_token_id is"),
        ({"eos_token_id": 1.5}, "eos_token_id is 1.5"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"eos_token_id": -5}, "eos_token_id is -5"),
        ({"eos_token_id": [0, 1 << 40]}, "eos_token_id is"),
        ({"eos_token_id": [0] * 1025}, "eos_token_id is"),
    ],
)
def test_a_default_that_no_request_could_use_is_named(wrong: dict[str, Any], message: str, model: Path) -> None:
    check_model(EngineConfig(model=str(model)))
    write(model / "generation_config.json", wrong)
    with pytest.raises(CheckpointError, match=FILE + message):
        check_model(EngineConfig(model=str(model)))


def test_ends_in_config_json_are_checked_where_they_count(model: Path) -> None:
    write(model / "config.json", {"eos_token_id": ["</s>"]})
    generation = model / "generation_config.json"
    write(generation, {"eos_token_id": [1, 0, 1]})
    assert check_model(EngineConfig(model=str(model))).eos_token_ids == (1, 0)
    write(generation, {"eos_token_id": None})
    with pytest.raises(CheckpointError, match=r"/config\.json is not usable: eos_token_id is \['</s>'\]"):
        check_model(EngineConfig(model=str(model)))


def test_what_models_are_published_with_is_taken() -> None:
    check_generation({}, "f")
    check_generation({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "do_sample": True}, "f")
    check_generation({"temperature": 0.0, "top_k": -1, "repetition_penalty": 1, "max_new_tokens": 2048}, "f")
    check_generation({"temperature": None, "top_p": None, "max_new_tokens": None}, "f")
