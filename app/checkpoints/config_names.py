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
    "internvl_chat": {"llm_config": "text_config"},
}
# The same within an object.
_PUBLISHED_WITHIN: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "internvl_chat": {"vision_config": {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}},
}

# Fields that only Jina's configurations of XLM-RoBERTa have, whose classes compute something else than those of that
# name: they have names of their own here.
_JINA, _SHARED = {"use_flash_attn", "lora_adaptations"}, "XLMRoberta"
_JINA_COLBERT = {"HF_ColBERT": "ColBERTJinaRobertaModel"}  # as users of vLLM name it

# What older families call the sizes.
OTHER_NAMES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "model_max_length"),
}
# What a family calls a size where the common name says something else.
_DECODER_NAMES = {
    **{"hidden_size": "d_model", "num_hidden_layers": "decoder_layers", "intermediate_size": "decoder_ffn_dim"},
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), "decoder_attention_heads"),
}
_T5_NAMES = {
    **{"hidden_size": "d_model", "num_hidden_layers": "num_decoder_layers", "intermediate_size": "d_ff"},
    "num_attention_heads": "num_heads",
}
OWN_NAMES = {
    "longcat_flash": {"num_hidden_layers": "num_layers"},
    **dict.fromkeys(("bart", "m2m_100", "marian", "mbart", "pegasus"), _DECODER_NAMES),
    **dict.fromkeys(("t5", "mt5"), _T5_NAMES),
    "whisper": {**_DECODER_NAMES, "max_position_embeddings": "max_target_positions"},
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
    """`config` with the fields of its model type under the common names, too, where these say nothing, and
    architectures under names that no other has."""
    kind = str(config.get("model_type"))
    found = _renamed(config, _PUBLISHED.get(kind, {}))
    if kind == "xlm-roberta" and not _JINA.isdisjoint(config) and isinstance(config.get("architectures"), list):
        named = [str(name) for name in config["architectures"]]
        named = [f"Jina{name}" if name.startswith(_SHARED) else _JINA_COLBERT.get(name, name) for name in named]
        found["architectures"] = named
    for part, names in _PUBLISHED_WITHIN.get(kind, {}).items():
        if isinstance(inner := found.get(part), Mapping):
            found[part] = _renamed(inner, names)
    return found


def _renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    found = {common: config[own] for own, common in names.items() if config.get(own) is not None}
    kept = {name: value for name, value in config.items() if value is not None or name not in found}
    return {**found, **kept}
