"""Layers that encoders of sound share: convolutions over frames, and Whisper's tower over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.fields.kinds import check
from app.checkpoints.fields.sound_json import SOUND_FIELDS
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule
from app.checkpoints.tensors.tensor_view import computed
from app.errors import CheckpointError, UnsupportedError
from app.kernels.attention.encoder import EncoderPlan, plan_encoder
from app.layers.activation import activation
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedTable
from app.layers.weight import REPLICATED, Weight
from app.models.multimodal.vision_layers import PlainBlock, Span, VisionAttention, VisionBlock

# A tower's names in checkpoints, as ours.
TOWER: list[Rule] = [
    (r"\.self_attn\.out_proj\.", ".attn.o_proj."),
    (r"\.self_attn\.", ".attn."),
    (r"\.self_attn_layer_norm\.", ".norm1."),
    (r"\.final_layer_norm\.", ".norm2."),
    (r"\.(fc[12])\.", r".mlp.\1."),
]
# A tower behind which a projector of two layers stands has these; its own blocks have layers of these names, too.
PROJECTED_TOWER: list[Rule] = [
    (r"^audio_tower\.", "tower."),
    (r"^multi_modal_projector\.linear_(\d)\.", r"projector.fc\1."),
    *((pattern, own) for pattern, own in TOWER if "fc" not in pattern),
    (r"^tower(\..*)\.(fc[12])\.", r"tower\1.mlp.\2."),
]
EPS = 1e-5
_KEYS = ".k_proj.weight"
_REQUIRED = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim")
_OTHER_NAMES = {
    **{"hidden_size": "d_model", "num_hidden_layers": "encoder_layers", "intermediate_size": "encoder_ffn_dim"},
    "num_attention_heads": "encoder_attention_heads",
}


@dataclass(slots=True, frozen=True)
class SoundSettings:
    """Sizes of a tower."""

    num_mels: int
    num_positions: int
    size: int
    inner: int
    num_layers: int
    num_heads: int
    act: str

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> SoundSettings:
        """Read them, by either kind of names. CheckpointError names a field that is unusable or lacking."""
        check(config, SOUND_FIELDS, where)
        own = {**{ours: config[name] for name, ours in _OTHER_NAMES.items() if name in config}, **config}
        if missing := next((name for name in _REQUIRED if own.get(name) is None), ""):
            raise CheckpointError(f"{where} is not usable: it lacks {missing}", param="model")
        if own.get("scale_embedding"):
            raise UnsupportedError(f"{where}: scale_embedding is not supported", param="model")
        size, layers, heads, inner = (int(own[name]) for name in _REQUIRED)
        mels, positions = int(own.get("num_mel_bins", 80)), int(own.get("max_source_positions", 1500))
        return cls(mels, positions, size, inner, layers, heads, str(own.get("activation_function", "gelu")))


class FrameConvolution(Layer):
    """A convolution of three frames, which keeps every frame or every second one."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(outputs, inputs, 3, dtype=ctx.dtype), REPLICATED)
        self.bias = Weight(torch.empty(outputs, dtype=ctx.dtype), REPLICATED)
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, frames] -> [n, outputs, frames / stride]."""
        return F.conv1d(x, self.weight, self.bias, stride=self.stride, padding=1)


class SoundTower(Layer):
    """Whisper's encoder (Radford et al., 2022): two convolutions, positions, attention of all frames to all."""

    def __init__(self, ctx: BuildContext, settings: SoundSettings, pooled: int = 1) -> None:
        """`pooled`: positions whose mean becomes one before the last norm."""
        super().__init__()
        s, size = settings, settings.size
        self.settings, self.pooled = s, pooled
        self.conv1 = FrameConvolution(ctx, s.num_mels, size, 1)
        self.conv2 = FrameConvolution(ctx, size, size, 2)
        self.act = activation("gelu")
        self.embed_positions = ReplicatedTable(ctx, s.num_positions, size)
        self.layers = sound_blocks(ctx, s)
        self.layer_norm = LayerNorm(ctx, size, EPS)
        self.dtype, self._device = ctx.dtype, ctx.device
        self._plans: dict[int, EncoderPlan] = {}  # of whole windows, by how many

    def plan_whole(self, count: int) -> EncoderPlan:
        """Plans what positions see of each other, of so many whole windows."""
        if count not in self._plans:
            size = self.settings.num_positions
            self._plans[count] = plan_encoder(list(range(0, count * size + 1, size)), self._device)
        return self._plans[count]

    def forward(self, features: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """[n, mels, 2 * positions] -> [n * positions / pooled, C]; `lengths`: the first positions of each that count,
        no others are computed."""
        x = self.act(self.conv2(self.act(self.conv1(features.to(self.dtype)))))
        x = x.transpose(1, 2) + self.embed_positions.weight
        counts = [self.settings.num_positions] * len(x) if lengths is None else list(lengths)
        plan = self.plan_whole(len(x)) if lengths is None else plan_encoder([0, *accumulate(counts)], x.device)
        x, span = torch.cat([own[:count] for own, count in zip(x, counts, strict=True)]), Span(plan)
        for layer in self.layers.values():
            x = layer(x, span)
        if self.pooled > 1:
            x = torch.cat([self._means(own) for own in torch.split(x, counts)])
        return self.layer_norm(x)  # type: ignore[no-any-return]

    def _means(self, x: torch.Tensor) -> torch.Tensor:
        whole = len(x) // self.pooled
        return x[: whole * self.pooled].view(whole, self.pooled, -1).mean(1)


def sound_blocks(ctx: BuildContext, s: SoundSettings) -> nn.ModuleDict:
    """The layers of a tower, by their numbers."""
    return nn.ModuleDict(
        {
            str(index): VisionBlock(
                (LayerNorm(ctx, s.size, EPS), LayerNorm(ctx, s.size, EPS)),
                VisionAttention(ctx, s.size, s.num_heads),
                PlainBlock(ctx, s.size, s.inner, s.act),
            )
            for index in range(s.num_layers)
        }
    )


def with_key_bias(name: str, tensor: StoredTensor) -> list[tuple[str, StoredTensor]]:
    """The tensor; with a projection of keys also a bias of zeros, as those of queries and values have one."""
    found = [(name, tensor)]
    if name.endswith(_KEYS):
        bias = computed(tensor, lambda x: x.new_zeros(len(x)))
        found.append((f"{name.removesuffix('weight')}bias", bias))
    return found
