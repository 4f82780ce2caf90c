"""What a decoder-only model is, independent of the family: filled from config.json by each family's file."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.model_info import ModelInfo
from app.errors import UnsupportedError


@dataclass(slots=True, frozen=True)
class DecoderSettings:
    """Sizes and switches of a pre-norm decoder with rotary attention and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]  # one for each layer
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_info(cls, info: ModelInfo) -> DecoderSettings:
        """The part of config.json that all families read alike; UnsupportedError for numbers that do not fit."""
        hf = info.hf_config
        if info.num_heads % info.num_kv_heads != 0:
            raise UnsupportedError(
                f"num_attention_heads={info.num_heads} is no multiple of num_key_value_heads={info.num_kv_heads}",
                param="model",
            )
        return cls(
            vocab_size=info.vocab_size,
            hidden_size=int(hf["hidden_size"]),
            intermediate_size=int(hf["intermediate_size"]),
            num_layers=info.num_layers,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            hidden_act=str(hf.get("hidden_act", "silu")),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            sliding_windows=(None,) * info.num_layers,
        )


def windows_by_layer_type(info: ModelInfo) -> tuple[int | None, ...]:
    """Sliding windows where `use_sliding_window` is set: of the layers that `layer_types` names, or, in older
    configurations, of those from `max_window_layers` on."""
    hf = info.hf_config
    if not hf.get("use_sliding_window", False) or hf.get("sliding_window") is None:
        return (None,) * info.num_layers
    window, first = int(hf["sliding_window"]), int(hf.get("max_window_layers", 28))
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(info.num_layers)]
    types = hf.get("layer_types") or default
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != info.num_layers:
        raise UnsupportedError(f"layer_types: unknown {sorted(unknown)} or a wrong number of layers", param="model")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
