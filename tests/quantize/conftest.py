"""A model and texts that the tests of this folder share, and leave as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quantize.models import speaking_model, texts_file


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts_file(tmp_path_factory.mktemp("texts") / "texts.jsonl")
