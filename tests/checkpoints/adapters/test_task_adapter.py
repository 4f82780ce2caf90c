"""The folder of the adapter that is part of a model's weights."""

from __future__ import annotations

import pytest

from app.checkpoints.adapters.task_adapter import task_adapter
from app.errors import UnsupportedError

JINA = {"model_type": "jina_embeddings_v5"}


def test_one_task_s_folder_or_none() -> None:
    assert task_adapter({"model_type": "qwen3", "jina_task": "retrieval"}) is None
    assert task_adapter(JINA) == "adapters/retrieval"
    assert task_adapter(JINA | {"jina_task": "clustering"}) == "adapters/clustering"


@pytest.mark.parametrize("task", ["../retrieval", "*", 3])
def test_another_task_is_named(task: object) -> None:
    with pytest.raises(UnsupportedError, match="jina_task="):
        task_adapter(JINA | {"jina_task": task})
