"""Brings config.json of every family into one form: plain numbers of one language model. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.backends import MODEL_CONFIGS
from app.checkpoints.config_names import with_common_names
from app.errors import CheckpointError, ConfigError

# Where config.json may say null and mean something: no window, cap, chunks or shared experts. Elsewhere null is what is
# left out.
_MEANT_NULLS = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size"),
    "n_shared_experts",
)
_NESTED = ("text_config", "rope_parameters", "rope_scaling")
# Which a model may give layer by layer (Hunyuan, Gemma 3n): the same for all is one number, what differs is refused.
_BY_LAYER = ("intermediate_size", "moe_topk", "moe_intermediate_size", "num_experts", "num_shared_expert")
_PARTS = {
    "dbrx": ("attn_config", "ffn_config"),
    "mpt": ("attn_config",),
}  # which hold numbers of the model, by model type

# What stands beside `text_config` and is not the text's own, by model type.
_REPEATED = {"paligemma": ("hidden_size", "vocab_size", "num_hidden_layers")}

# What the text part of a model that also sees leaves out where it is transformers' default, by the part's model type.
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {
        **{"vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192},
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    # LLaVA's and Pixtral's.
    "llama": {
        **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32},
        "num_attention_heads": 32,
    },
    "mistral": {
        **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "clip_text_model": {
        **{"vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12},
        **{"num_attention_heads": 8, "max_position_embeddings": 77},
    },
    "siglip_text_model": {
        **{"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "max_position_embeddings": 64, "pad_token_id": 1},
    },
    "gemma4_text": {
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}


def plain_config(read: dict[str, Any]) -> dict[str, Any]:
    """The description of the language model in a config.json. CheckpointError names what is not usable."""
    return _text_part(_without_nulls(with_common_names(_wrapped(_thinker(_translated(read))))))


def _translated(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a plugin's model type as the plugin translates it; any other as it is."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_CONFIGS:
        return config
    try:
        translated = MODEL_CONFIGS.load(kind)(dict(config))
    except (LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"config.json of model type {kind!r} is not usable: {reason}", param="model") from error
    if not isinstance(translated, dict):
        raise ConfigError(f"config.json of model type {kind!r}: {MODEL_CONFIGS.plugin(kind)} gives no object")
    return translated


def _thinker(config: dict[str, Any]) -> dict[str, Any]:
    """The half of Qwen's models that listens and answers in text, under the name of the whole; any other as it is."""
    half = config.get("thinker_config")
    if not isinstance(half, Mapping):
        return config
    kind = half.get("model_type") or f"{config.get('model_type')}_thinker"
    others = {name: value for name, value in config.items() if not name.endswith("_config")}
    return {**others, **half, "architectures": config.get("architectures"), "model_type": kind}


def _wrapped(config: dict[str, Any]) -> dict[str, Any]:
    """The model that a model for retrieval is made of (ColQwen2, ColPali), under the name of the whole; any other as it
    is."""
    inner = config.get("vlm_config")
    if not isinstance(inner, Mapping):
        return config
    others = {name: value for name, value in config.items() if name != "vlm_config"}
    repeated = _REPEATED.get(str(inner.get("model_type")), ())
    inner = {name: value for name, value in inner.items() if name not in repeated}
    return {**others, **inner, "architectures": config.get("architectures")}


def _without_nulls(config: dict[str, Any], nested: bool = False) -> dict[str, Any]:
    """`config` less what it says null of, as if it had been left out."""
    kept = {name: value for name, value in config.items() if value is not None or name in _MEANT_NULLS}
    for name, value in kept.items():
        if isinstance(value, dict) and (nested or name in _NESTED):
            kept[name] = _without_nulls(value, nested=name != "text_config")
    return kept


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model of a model that also sees, under its own architecture's name; any other as it is."""
    config = _one_for_all(config)
    for part in _PARTS.get(str(config.get("model_type")), ()):
        if not isinstance(config.get(part) or {}, Mapping):
            raise CheckpointError(f"config.json: {part} is {config[part]!r:.80}, not an object", param="model")
        config = {**(config.get(part) or {}), part: {}, **config}
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    kind = str(text.get("model_type"))
    outer = {name: config[name] for name in config if name != "text_config"}
    return {**_TEXT_DEFAULTS.get(kind, {}), **_one_for_all(text), **outer, "text_model_type": kind}


def _one_for_all(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with one number where it has the same for each layer."""
    lists = (name for name in _BY_LAYER if isinstance(config.get(name), list))
    return config | {name: config[name][0] for name in lists if len({*map(str, config[name])}) == 1}
