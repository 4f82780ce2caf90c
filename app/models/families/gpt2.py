"""GPT-2: learned positions, layer norms, a plain feed-forward layer, and matrices stored the other way round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.checkpoints.tensors.tensor_view import split_rows, transposed
from app.errors import UnsupportedError
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings

_NAMES = [
    (r"^(?:transformer\.)?h\.", "model.layers."),
    (r"^(?:transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(?:transformer\.)?ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
]


class GPT2LMHeadModel(CausalLM):
    """Checkpoints may lack the prefix `transformer`, and hold the attention's mask."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for the scalings that no known checkpoint uses."""
        hf = info.hf_config
        for name, usual in (("scale_attn_by_inverse_layer_idx", False), ("scale_attn_weights", True)):
            if hf.get(name, usual) != usual:
                raise UnsupportedError(f"GPT-2 with {name}={hf[name]} is not supported", param="model")
        return replace(
            DecoderSettings.from_info(info, tied=True, hidden_act="gelu_new", norm_eps=1e-5),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            rope_types=(NO_ROPE,) * info.num_layers,
            num_positions=info.max_position_embeddings,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Our names; matrices [in, out] are turned, and `c_attn` is split."""
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return
        is_turned = ".c_" in name and name.endswith(".weight")
        own, stored = renamed(name, _NAMES), transposed(tensor) if is_turned else tensor
        head, found, leaf = own.rpartition(".attn.c_attn.")
        if not found:
            yield own, stored
            return
        for part, one in split_rows(stored, dict.fromkeys(("q_proj", "k_proj", "v_proj"), settings.hidden_size)):
            yield f"{head}.self_attn.{part}.{leaf}", one
