"""OPT: learned positions from row 2 on, layer norms, ReLU; the 350M one norms its sums and has narrow embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.errors import UnsupportedError
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_layers.post_norm import NormedSumLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings

OFFSET = 2  # rows of tables of positions before the first token's, in models trained by fairseq
_BLOCKS: list[Rule] = [
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."),
]
_NAMES: list[Rule] = [
    (r"^(?:model\.)?decoder\.", "model."),
    (r"^model\.final_layer_norm\.", "model.norm."),
    *_BLOCKS,
]
_BEFORE: list[Rule] = [
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
]
FAIRSEQ_NAMES: list[Rule] = [(r"^model\.layer_norm\.", "model.norm."), *_BLOCKS, *_BEFORE]  # of its other models
_AFTER: list[Rule] = [
    (r"\.self_attn_layer_norm\.", ".post_attention_layernorm."),
    (r"\.final_layer_norm\.", ".post_feedforward_layernorm."),
]


class OPTForCausalLM(CausalLM):
    """Biases everywhere but in the head."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for norms without weights."""
        hf = info.hf_config
        if not hf.get("layer_norm_elementwise_affine", True):
            raise UnsupportedError("OPT with layer_norm_elementwise_affine=False is not supported", param="model")
        before = bool(hf.get("do_layer_norm_before", True))
        bias = bool(hf.get("enable_bias", True))
        return replace(
            DecoderSettings.from_info(info, tied=True, hidden_act="relu", norm_eps=1e-5),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            rope_types=(NO_ROPE,) * info.num_layers,
            num_positions=info.max_position_embeddings + OFFSET,
            position_offset=OFFSET,
            embedding_size=int(hf.get("word_embed_proj_dim") or info.hidden_size),
            norms_sums=not before,
            final_norm=before and not hf.get("_remove_final_layer_norm", False),
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Norms before or after."""
        before = info.hf_config.get("do_layer_norm_before", True)
        return cls.blocks if before else replace(cls.blocks, layer=NormedSumLayer)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """OPT's names as ours."""
        return [(renamed(name, _NAMES + (_AFTER if settings.norms_sums else _BEFORE)), tensor)]
