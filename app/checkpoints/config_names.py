"""Fields of config.json under the names that other families give them, and under other values. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Names of fields in configurations as families published them, by model type, and what they are called here.
_PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "chatglm": {
        "padded_vocab_size": "vocab_size",
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "seq_length": "max_position_embeddings",
        "layernorm_epsilon": "layer_norm_epsilon",
    },
    "exaone": {"num_layers": "num_hidden_layers"},
    "bloom": {"n_embed": "hidden_size", "seq_length": "max_position_embeddings"},
    "jetmoe": {"kv_channels": "head_dim"},
    "mpt": {"max_seq_len": "max_position_embeddings"},
}


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with other values; of an object, those of the names that are given."""
    found = dict(config)
    for name, value in overrides.items():
        inner = found.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = overridden(inner, value)
        found[name] = value
    return found


def with_common_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the fields of its model type under the common names, too, where these say nothing."""
    names = _PUBLISHED.get(str(config.get("model_type")), {})
    found = {common: config[own] for own, common in names.items() if config.get(own) is not None}
    kept = {name: value for name, value in config.items() if value is not None or name not in found}
    return {**found, **kept}
