"""config.json of `model_type` arcee_example under the names that Manta reads; nothing here may need torch."""

from __future__ import annotations

from typing import Any

NAMES = {"depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}


def translated(config: dict[str, Any]) -> dict[str, Any]:
    """KeyError names what is missing."""
    return config | {ours: config[theirs] for theirs, ours in NAMES.items()}
