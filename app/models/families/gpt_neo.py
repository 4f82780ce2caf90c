"""GPT-Neo: GPT-2 whose scores are not scaled, with a window in every second layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.errors import UnsupportedError
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings

_NAMES: list[Rule] = [
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.wpe\.", "model.embed_positions."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
]
_BUFFERS = (".attention.bias", ".attention.masked_bias")


class GPTNeoForCausalLM(CausalLM):
    """Only the projection behind attention and the feed-forward layer have biases."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        window = int(info.hf_config.get("window_size", 256))
        return replace(
            DecoderSettings.from_info(info, tied=True, hidden_act="gelu_new", norm_eps=1e-5),
            output_bias=True,
            mlp_bias=True,
            attention_scale=1.0,
            sliding_windows=tuple(window if kind == "local" else None for kind in _kinds(info)),
            rope_types=(NO_ROPE,) * info.num_layers,
            num_positions=info.max_position_embeddings,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """GPT-Neo's names as ours."""
        return [] if name.endswith(_BUFFERS) else [(renamed(name, _NAMES), tensor)]


def _kinds(info: ModelInfo) -> list[str]:
    """Reads `attention_types`: lists of kinds, each with how often it is repeated; UnsupportedError where that names
    another number of layers, or an unknown kind."""
    given = info.hf_config.get("attention_types", [[["global", "local"], info.num_layers // 2]])
    kinds = [str(kind) for names, count in given for _ in range(min(int(count), info.num_layers)) for kind in names]
    if len(kinds) != info.num_layers or not {"global", "local"} >= set(kinds):
        raise UnsupportedError(f"attention_types={given!r:.80} of {info.num_layers} layers", param="model")
    return kinds
