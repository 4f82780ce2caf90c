"""Latent attention in GGUF files of 2025 and later: `kv_b_proj` lies there as the keys' part, transposed for each head,
and the values' part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import CheckpointError

_KEYS, _VALUES, _BOTH = ".k_b_proj.weight", ".v_b_proj.weight", ".kv_b_proj.weight"


def join_keys_and_values(places: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The place of keys [H, R, Dn] under the name of both, with that of values [H, Dv, R] in it. CheckpointError where
    they do not go together."""
    joined = {name: place for name, place in places.items() if not name.endswith((_KEYS, _VALUES))}
    for name, keys in places.items():
        if not name.endswith(_KEYS):
            continue
        stem = name.removesuffix(_KEYS)
        values = places.get(stem + _VALUES)
        if values is None:
            raise CheckpointError(f"GGUF: the file has {name}, but lacks {stem}{_VALUES}", param="model")
        shapes = keys["shape"], values["shape"]
        if [len(shape) for shape in shapes] != [3, 3] or shapes[0][:2] != [shapes[1][0], shapes[1][2]]:
            raise CheckpointError(f"GGUF: {name} has shape {shapes[0]}, its values {shapes[1]}", param="model")
        joined[stem + _BOTH] = {**keys, "values": values}
    return joined
