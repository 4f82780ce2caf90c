"""OLMo hybrid: three layers of gated delta net, normed before their blocks, to one of OLMo 3's, normed after them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.kernels.recurrent import DeltaHeads
from app.layers.context import BuildContext
from app.layers.gated_delta_net import DeltaSettings
from app.models.blocks import Blocks, LayerPlace, grouped_query_attention
from app.models.decoder import CausalLM
from app.models.decoder_layers.post_norm import PostNormLayer
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.families.olmo2 import Olmo2ForCausalLM
from app.models.mixers import FULL, LINEAR, ByKind, checked_delta, delta_mixer, every_nth_attends, kinds_of

_NAMES: list[Rule] = [
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    (r"\.linear_attn\.([qkvab])_proj\.", r".self_attn.in_proj_\1."),
    (r"\.linear_attn\.g_proj\.", ".self_attn.in_proj_z."),
    (r"\.linear_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.linear_attn\.o_norm\.", ".self_attn.norm."),
    (r"\.linear_attn\.", ".self_attn."),
]
_NORM_EPS = 1e-5  # behind delta nets, whatever config.json says of the other norms


def _delta(info: ModelInfo) -> DeltaSettings:
    hf = info.hf_config
    keys, values = (int(hf.get(f"linear_num_{kind}_heads") or info.num_heads) for kind in ("key", "value"))
    key_dim = int(hf.get("linear_key_head_dim") or 0.75 * info.hidden_size / keys)
    settings = DeltaSettings(
        DeltaHeads(keys, values, key_dim, int(hf.get("linear_value_head_dim") or 2 * key_dim)),
        int(hf.get("linear_conv_kernel_dim", 4)),
        _NORM_EPS,
        rate_scale=2.0 if hf.get("linear_allow_neg_eigval", True) else 1.0,
        splits_conv=True,
    )
    return checked_delta(settings, info)


def _kinds(info: ModelInfo) -> tuple[str, ...]:
    return kinds_of(info, every_nth_attends(info, 4))


class OlmoHybridForCausalLM(CausalLM):
    """Attention knows no positions where config.json has no `rope_theta`, as in what is published."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        _delta(info), _kinds(info)
        ropes = hf.get("rope_parameters") or hf
        return replace(
            Olmo2ForCausalLM.settings(info),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope_types=() if ropes.get("rope_theta") is not None else (NO_ROPE,) * info.num_layers,
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        kinds = _kinds(info)

        def layer(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> nn.Module:
            kind = PostNormLayer if kinds[place.index] == FULL else PreNormLayer
            return kind(ctx, settings, place, blocks)

        mixers = {LINEAR: delta_mixer(_delta(info)), FULL: grouped_query_attention}
        return Blocks(attention=ByKind(kinds, mixers), layer=layer)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Ours for what delta nets call otherwise."""
        return [(renamed(name, _NAMES), tensor)]
