"""Falcon-H1: attention and Mamba 2 beside each other in every layer, and many multipliers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.kernels.gemm import Activations, materialize
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN, AddNorm, Epilogue, ResultT
from app.layers.layer import Layer
from app.layers.mamba2 import Mamba2Settings
from app.layers.mlp import GatedMLP
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder import CausalLM
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_settings import DecoderSettings
from app.models.mixers import Mixer, mamba2_mixer, mamba2_settings, mamba2_tensors

_NAMES: list[Rule] = [
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"^model\.final_layernorm\.", "model.norm."),
]


@dataclass(slots=True, frozen=True)
class Multipliers:
    """Numbers by which a layer's blocks are multiplied; that of keys joins the scale of scores."""

    attention_in: float
    attention_out: float
    mamba_out: float
    gate: float
    down: float

    @classmethod
    def of(cls, info: ModelInfo) -> Multipliers:
        """Those of config.json."""
        hf = info.hf_config
        gate, down = hf.get("mlp_multipliers") or (1.0, 1.0)
        return cls(
            attention_in=float(hf.get("attention_in_multiplier", 1.0)),
            attention_out=float(hf.get("attention_out_multiplier", 1.0)),
            mamba_out=float(hf.get("ssm_out_multiplier", 1.0)),
            gate=float(gate),
            down=float(down),
        )


class ScaledMLP(Layer):
    """down(act(gate * m) * up) * n."""

    def __init__(self, mlp: GatedMLP, gate: float, down: float) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act = mlp.gate_up_proj, mlp.down_proj, mlp.act
        self.scales = gate, down

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext | None = None) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return epilogue.after(self.down_proj(self.act(gate * self.scales[0]) * up) * self.scales[1])


@dataclass(slots=True, frozen=True)
class BothMixers:
    """Makes layers with these numbers."""

    mamba: Mixer
    numbers: Multipliers

    def __call__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> nn.Module:
        """The layer of the place."""
        return FalconH1Layer(ctx, settings, place, blocks, self)


class FalconH1Layer(DecoderLayer):
    """x + mamba(norm(x)) + attention(norm(x)), then x + mlp(norm(x))."""

    norms = MappingProxyType({"input_layernorm": False, "post_attention_layernorm": True})
    post_attention_layernorm: Norm

    def __init__(
        self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks, both: BothMixers
    ) -> None:
        super().__init__(ctx, settings, place, blocks)
        self.mamba = both.mamba(ctx, settings, place)
        self.numbers = both.numbers
        assert isinstance(self.mlp, GatedMLP)
        self.mlp = ScaledMLP(self.mlp, self.numbers.gate, self.numbers.down)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        read, n = materialize(normed), self.numbers
        mixed: torch.Tensor = self.mamba(read, PLAIN, ctx) * n.mamba_out
        attended: torch.Tensor = self.self_attn(read * n.attention_in, PLAIN, ctx) * n.attention_out
        normed, x = AddNorm(x, self.post_attention_layernorm).after(mixed + attended)
        return self.mlp(normed, AddNorm(x, next_norm), ctx)  # type: ignore[no-any-return]


def _mamba(info: ModelInfo) -> Mamba2Settings:
    hf = info.hf_config
    norms = bool(hf.get("mamba_rms_norm", False))
    return mamba2_settings(
        info,
        norm_groups=int(hf.get("mamba_n_groups", 1)) if norms else 0,
        norms_first=bool(hf.get("mamba_norm_before_gate", True)),
        input_scale=float(hf.get("ssm_in_multiplier", 1.0)),
        part_scales=tuple(map(float, hf.get("ssm_multipliers") or ())),
    )


class FalconH1ForCausalLM(CausalLM):
    """Every layer keeps a state and caches keys and values."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        self.mamba = _mamba(info)
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        _mamba(info), Multipliers.of(info)
        bias = bool(hf.get("attention_bias", False))
        settings = DecoderSettings.from_info(info, norm_eps=1e-5)
        return replace(
            settings,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            attention_scale=float(hf.get("key_multiplier", 1.0)) * settings.head_dim**-0.5,
            embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
            logit_scale=float(hf.get("lm_head_multiplier", 1.0)),
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Layers with both."""
        return Blocks(layer=BothMixers(mamba2_mixer(_mamba(info)), Multipliers.of(info)))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names, and the parts of Mamba's projection."""
        return mamba2_tensors(self.mamba, renamed(name, _NAMES), tensor)
