"""config.json of a GGUF file's metadata: what llama.cpp's keys say, under transformers' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.checkpoints.gguf.architecture import Architecture
from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys, token_id
from app.errors import CheckpointError, UnsupportedError

Tables = Mapping[str, Sequence[float]]  # of rotary frequencies, by their tensors' names

# Name in config.json: key behind the architecture's name.
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
_HEADS = {"num_attention_heads": "attention.head_count"}
_NORM = "attention.layer_norm_rms_epsilon"
_OPTIONAL_SIZES = {"num_key_value_heads": "attention.head_count_kv", "sliding_window": "attention.sliding_window"}
_OPTIONAL_NUMBERS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Layers of the largest Gemmas, whose scores are scaled by what a head would have of the hidden size.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}


def config_json(header: GgufHeader, architecture: Architecture, tables: Tables) -> dict[str, Any]:
    """The object, less `quantization_config`. CheckpointError names what the metadata lack."""
    keys = Keys(header.metadata, architecture.zeros_are_none)
    sizes = {**_SIZES, **(_HEADS if architecture.attends else {}), **architecture.sizes}
    numbers = {**_OPTIONAL_NUMBERS, **architecture.numbers}
    config: dict[str, Any] = {name: keys.needed(key) for name, key in sizes.items()}
    config["num_hidden_layers"] = keys.num_layers()
    config["rms_norm_eps"] = keys.must(_NORM, keys.number(_NORM))
    config |= dict(architecture.config)
    config |= {name: value for name, key in _OPTIONAL_SIZES.items() if (value := keys.size(key))}
    config |= {name: one for name, key in numbers.items() if (one := keys.number(key)) is not None}
    config |= architecture.derived(keys, header)
    if architecture.attends and "kv_lora_rank" not in config:
        config["head_dim"] = _head_dim(keys, config)
    return {
        "architectures": [architecture.causal_class],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        **config,
        **_biases(header),
        **_attention_scale(architecture.model_type, config),
        **(_rope(keys, architecture, config, tables) if architecture.attends else {}),
        **_token_ids(header.metadata, _vocab_size(header)),
    }


def _head_dim(keys: Keys, config: Mapping[str, Any]) -> int:
    """Not `rope.dimension_count`, which is of the part that rotates."""
    head_dim = keys.size("attention.key_length") or config["hidden_size"] // config["num_attention_heads"]
    if not head_dim:
        raise CheckpointError("GGUF: attention.head_count is more than embedding_length", param="model")
    if (value_dim := keys.size("attention.value_length")) not in (None, head_dim):
        raise UnsupportedError(f"GGUF: values of {value_dim} with keys of {head_dim}", param="model")
    return int(head_dim)


def _vocab_size(header: GgufHeader) -> int:
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError("GGUF: the file lacks token_embd.weight", param="model")
    return table.shape[0]


def _dtype(header: GgufHeader) -> str:
    """float16 where that is all there is, besides norms; models are trained in bfloat16, whose range quantized ones
    may need."""
    types = {tensor.block.name for tensor in header.tensors.values()}
    return "float16" if types <= {"F32", "F16"} and "F16" in types else "bfloat16"


def _biases(header: GgufHeader) -> dict[str, Any]:
    has = any(name.endswith((".attn_q.bias", ".attn_kv_a_mqa.bias")) for name in header.tensors)
    return {"attention_bias": has, "qkv_bias": has}


def _attention_scale(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if model_type not in _LARGEST_GEMMA:
        return {}
    is_largest = config["num_hidden_layers"] == _LARGEST_GEMMA[model_type]
    scaled_by = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"query_pre_attn_scalar": scaled_by}


def _rope(keys: Keys, architecture: Architecture, config: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    """`rope_parameters`: factors come as tables of the file, or as a kind of scaling."""
    theta = keys.number("rope.freq_base") or 10_000.0
    common = {"rope_theta": theta, "partial_rotary_factor": _rotating_part(keys, config)}
    full = common | _scaling(keys, architecture, config, tables)
    if architecture.model_type != "gemma3_text":
        return {"rope_parameters": full}
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa") or 10_000.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _rotating_part(keys: Keys, config: Mapping[str, Any]) -> float:
    part, whole = keys.size("rope.dimension_count") or config["head_dim"], config["head_dim"]
    if part > whole:
        raise CheckpointError(f"GGUF: rope.dimension_count is {part}, more than a head's {whole}", param="model")
    return float(part / whole)


def _scaling(keys: Keys, architecture: Architecture, config: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    original = keys.size("rope.scaling.original_context_length") or config["max_position_embeddings"]
    if tables:
        common = tables.get("rope_freqs.weight", ())
        return {
            "rope_type": "longrope",
            "short_factor": list(tables.get("rope_factors_short.weight", common)),
            "long_factor": list(tables.get("rope_factors_long.weight", common)),
            "original_max_position_embeddings": original,
            "attention_factor": keys.number("rope.scaling.attn_factor") or 1.0,
        }
    # Where a file says no kind, it is linear; older ones have its factor under another name.
    kind = keys.text("rope.scaling.type") or "linear"
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear")
    if kind == "none" or not factor:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"factor": factor, "original_max_position_embeddings": original, **_yarn(keys), **architecture.rope}
    raise UnsupportedError(f"GGUF: rope.scaling.type {kind!r} is not supported", param="model")


def _yarn(keys: Keys) -> dict[str, Any]:
    betas = {name: keys.number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    yarn: dict[str, Any] = {"rope_type": "yarn", **{name: beta for name, beta in betas.items() if beta is not None}}
    if weight := keys.number("rope.scaling.yarn_log_multiplier"):  # a tenth of what DeepSeek scales the scores by
        yarn |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * weight)
    return yarn


def _token_ids(metadata: Mapping[str, Any], size: int) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {own: token_id(metadata, name, size) for own, name in names.items()}
    return {own: value for own, value in found.items() if value is not None}
