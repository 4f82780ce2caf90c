"""Nemotron-H: layers of one block each, Mamba 2, attention, or a feed-forward layer or experts with squared ReLU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.errors import UnsupportedError
from app.kernels.moe import GLU
from app.layers.context import BuildContext
from app.layers.experts.expert_mlp import ExpertMLP
from app.layers.experts.latent_experts import LatentExpertMLP
from app.layers.experts.settings import ExpertSettings
from app.layers.mamba2 import Mamba2Settings
from app.models.blocks import Blocks, LayerPlace, grouped_query_attention, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_layers.one_block import OneBlockLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.families.deepseek import sigmoid_experts
from app.models.families.mamba import BACKBONE_NAMES
from app.models.mixers import FULL, LINEAR, ByKind, Mixer, checked, kinds_of, mamba2_mixer, mamba2_tensors

_MLP, _MOE = "mlp", "moe"
_MARKS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}
_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 7688, "num_experts_per_tok": 2, "norm_topk_prob": True}


def _mamba(info: ModelInfo) -> Mamba2Settings:
    hf = info.hf_config
    groups = int(hf.get("n_groups", 8))
    return checked(
        Mamba2Settings(
            num_heads=int(hf.get("mamba_num_heads", 128)),
            head_dim=int(hf.get("mamba_head_dim", 64)),
            num_groups=groups,
            state_size=int(hf.get("ssm_state_size", 128)),
            conv_width=int(hf.get("conv_kernel", 4)),
            conv_bias=bool(hf.get("use_conv_bias", True)),
            bias=bool(hf.get("use_bias", False)),
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            norm_groups=groups,
            dt_limit=(float(hf.get("time_step_min", 0.001)), float("inf")),
        ),
        info,
    )


def _kinds(info: ModelInfo) -> tuple[str, ...]:
    marks = info.hf_config.get("hybrid_override_pattern") or ""
    default = [_MARKS.get(mark, mark) for mark in marks]
    return kinds_of(info, default, _MARKS.values())


def _experts(info: ModelInfo) -> ExpertSettings | None:
    hf, layers = info.hf_config, frozenset(i for i, kind in enumerate(_kinds(info)) if kind == _MOE)
    if not layers:
        return None
    for name, value in (("mlp_hidden_act", "relu2"), ("mlp_bias", False)):
        if hf.get(name) not in (None, value):
            raise UnsupportedError(f"{name}={hf[name]!r} beside experts is not supported", param="model")
    settings = sigmoid_experts(info, _EXPERTS)
    assert settings is not None
    shared = int(hf.get("moe_shared_expert_intermediate_size", 7688)) if hf.get("n_shared_experts", 1) else 0
    return replace(settings, layers=layers, activation=GLU("relu2"), shared_size=shared)


def _expert_mixer(info: ModelInfo) -> Mixer:
    """Makes layers of experts, which may read a smaller vector."""
    latent_size = int(info.hf_config.get("moe_latent_size") or 0)

    def mixer(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> ExpertMLP:
        assert settings.experts is not None
        shape = settings.hidden_size, settings.hidden_act, settings.experts
        return LatentExpertMLP(ctx, *shape, latent_size) if latent_size else ExpertMLP(ctx, *shape)

    return mixer


class NemotronHForCausalLM(CausalLM):
    """Attention knows no positions. Layers that predict further tokens are left to the drafter `mtp`."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        self.mamba = _mamba(info)
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        _mamba(info), _kinds(info)
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            hidden_act=str(hf.get("mlp_hidden_act", "relu2")),
            head_dim=int(hf.get("head_dim") or 128),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            rope_types=(NO_ROPE,) * info.num_layers,
            experts=_experts(info),
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        mixers = {LINEAR: mamba2_mixer(_mamba(info)), FULL: grouped_query_attention, _MLP: plain_mlp}
        mixers[_MOE] = _expert_mixer(info)
        return Blocks(attention=ByKind(_kinds(info), mixers), layer=OneBlockLayer)

    @classmethod
    def blocks_behind(cls, info: ModelInfo) -> Blocks:
        """See CausalLM: two layers of one block, which are an ordinary one."""
        hf = info.hf_config
        named = hf.get("mtp_layers_block_type") or hf.get("mtp_hybrid_override_pattern") or "*E"
        if list(named) not in (["*", "E"], ["attention", _MOE], [FULL, _MOE]) or _MOE not in _kinds(info):
            what = f"mtp_layers_block_type={named!r} is not supported; known: attention, experts as the model's"
            raise UnsupportedError(what, param="model")
        return Blocks(mlp=_expert_mixer(info))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names, and the parts of Mamba's projection."""
        return [] if name.startswith("mtp.") else mamba2_tensors(self.mamba, renamed(name, BACKBONE_NAMES), tensor)
