"""GPT-NeoX and Pythia: attention and feed-forward layer beside each other, each with its norm; partial rotation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.layers.rope_scaling import RopeSettings
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_layers.parallel import TwoNormParallelLayer
from app.models.decoder_settings import DecoderSettings
from app.models.grouped_heads import taken_apart

_NAMES = [
    (r"^gpt_neox\.", "model."),
    (r"^embed_out\.", "lm_head."),
    (r"^model\.embed_in\.", "model.embed_tokens."),
    (r"^model\.final_layer_norm\.", "model.norm."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
]
_BUFFERS = (".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq")


class GPTNeoXForCausalLM(CausalLM):
    """One matrix holds query, key and value of each head side by side."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp, layer=TwoNormParallelLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        bias = bool(info.hf_config.get("attention_bias", True))
        settings = DecoderSettings.from_info(info, hidden_act="gelu", norm_eps=1e-5)
        return replace(settings, qkv_bias=bias, output_bias=bias, mlp_bias=True)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """One block after the other where `use_parallel_residual` is off."""
        return cls.blocks if info.hf_config.get("use_parallel_residual", True) else replace(cls.blocks, layer=None)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """A quarter of a head turns, where config.json does not say; it has names of its own for both numbers."""
        hf = info.hf_config
        old = {
            "partial_rotary_factor": hf.get("rotary_pct", 0.25),
            "rope_theta": hf.get("rotary_emb_base", 10000.0),
        }
        return lambda layer_type: RopeSettings.from_hf(old | hf, settings.head_dim, max_model_len, layer_type)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Our names, `query_key_value` taken apart."""
        if name.endswith(_BUFFERS):
            return
        yield from taken_apart(settings, renamed(name, _NAMES), tensor, ".attention.query_key_value.")
