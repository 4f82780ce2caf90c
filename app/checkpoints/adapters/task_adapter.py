"""Names the adapter that a checkpoint brings for the task that it serves, which is part of its weights (Jina Embeddings
v5). No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import UnsupportedError

TASKS = ("retrieval", "text-matching", "clustering", "classification")


def task_adapter(hf_config: Mapping[str, Any]) -> str | None:
    """The adapter's folder in the model's; None where the weights need none. UnsupportedError names another task."""
    if hf_config.get("model_type") != "jina_embeddings_v5":
        return None
    task = hf_config.get("jina_task") or TASKS[0]
    if task not in TASKS:
        raise UnsupportedError(f"jina_task={task!r:.80}: known are {', '.join(TASKS)}", param="model")
    return f"adapters/{task}"
