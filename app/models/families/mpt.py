"""MPT: ALiBi, layer norms without bias, no biases at all, queries, keys and values in one matrix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.models.alibi import alibi_slopes
from app.models.blocks import Blocks, plain_mlp, unbiased_layer_norm
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings

_NAMES: list[Rule] = [
    (r"^transformer\.blocks\.", "model.layers."),
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.norm_f\.", "model.norm."),
    (r"\.norm_1\.", ".input_layernorm."),
    (r"\.norm_2\.", ".post_attention_layernorm."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.ffn\.", ".mlp."),
]
_USUAL = {"alibi": True, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}


class MptForCausalLM(CausalLM):
    """MPT-7B and 30B."""

    blocks = Blocks(norm=unbiased_layer_norm, mlp=plain_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError names what no published MPT with these tensors has."""
        hf = info.hf_config
        for name, usual in _USUAL.items():
            if hf.get(name, usual) != usual:
                raise UnsupportedError(f"MPT with attn_config.{name}={hf[name]!r:.80} is not supported", param="model")
        if not hf.get("no_bias", True) or hf.get("logit_scale"):
            raise UnsupportedError("MPT with biases, or with logit_scale, is not supported", param="model")
        settings = DecoderSettings.from_info(info, tied=True, norm_eps=1e-5)
        most = float(hf.get("alibi_bias_max", 8)) / 8.0
        scale, clip = hf.get("softmax_scale"), hf.get("clip_qkv")
        return replace(
            settings,
            hidden_act="gelu",
            intermediate_size=int(hf.get("expansion_ratio", 4)) * info.hidden_size,
            attention_scale=None if scale is None else float(scale),
            attention_clip=None if clip is None else float(clip),
            alibi_slopes=tuple(slope**most for slope in alibi_slopes(settings.num_heads)),
            rope_types=(NO_ROPE,) * settings.num_layers,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Our names, `Wqkv` taken apart."""
        own = renamed(name, _NAMES)
        head, found, leaf = own.rpartition(".attn.Wqkv.")
        if not found:
            yield own, tensor
            return
        width = settings.num_heads * settings.head_dim
        for part, rows in split_rows(tensor, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)):
            yield f"{head}.self_attn.{part}.{leaf}", rows
