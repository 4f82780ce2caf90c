"""The files of sentence-transformers: modules.json and the config.json of each module. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from app.checkpoints.fields.kinds import FLAG, OBJECT, TEXT, Kind, either, several, whole


def _is_module(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        return False
    path = value.get("path", "")
    return isinstance(path, str) and not path.startswith("/") and ".." not in PurePosixPath(path).parts


MODULES = several(Kind("an object with its type, and a path within the directory", _is_module), 64)
POOLING_FIELDS: Mapping[str, Kind] = {"pooling_mode": either(TEXT, several(TEXT, 8)), "include_prompt": FLAG}
PROMPT_FIELDS: Mapping[str, Kind] = {
    "prompts": Kind(
        "an object of at most 256 names and texts",
        lambda value: (
            OBJECT.holds(value) and len(value) <= 256 and all(isinstance(text, str) for text in value.values())
        ),
    ),
    "default_prompt_name": TEXT,
    "activation_fn": TEXT,
}
VERDICT_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("true_token_id", "false_token_id"), whole(0, 1 << 30)),
    "module_input_name": TEXT,
}
SPLADE_FIELDS: Mapping[str, Kind] = {"pooling_strategy": TEXT, "activation_function": TEXT}
DENSE_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("in_features", "out_features"), whole(1, 1 << 20)),
    "bias": FLAG,
    "activation_function": TEXT,
}
