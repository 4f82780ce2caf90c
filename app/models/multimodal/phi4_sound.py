"""Phi-4-multimodal's encoder of sounds: convolutions that keep every eighth frame, and a Conformer (Gulati et al.,
2020) whose positions of a stretch of 40 seconds see each other, with a bias for how far they are apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.fields.kinds import TEXT, check, whole
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import CheckpointError, UnsupportedError
from app.layers.activation import activation
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedLinear, ReplicatedTable
from app.layers.weight import REPLICATED, Weight
from app.media.audio.phi4 import FRAMES_EACH
from app.media.audio.qwen_omni import halved
from app.models.multimodal.base import MediaEncoder, Picture

Grid = tuple[int, int, int]
EPS = 1e-5
MOST_POSITIONS = 500  # that see each other
_HALVINGS = 3
_SIZE, _COUNT = whole(1, 1 << 16), whole(1, 1 << 10)
_FIELDS = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "input_size", "nemo_conv_channels"), _SIZE),
    **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "bias_max_distance"), _SIZE),
    **dict.fromkeys(("num_blocks", "num_attention_heads", "kernel_size"), _COUNT),
    **dict.fromkeys(("activation", "conv_activation", "conv_glu_type", "nemo_activation"), TEXT),
}
# Fields with the only value that is served.
_FIXED = {"chunk_size": -1, "bias_symmetric": False, "depthwise_multiplier": 1, "downsample_rate": 1}


class PlainConvolution(Layer):
    """A convolution of a row or a plane, with a bias."""

    def __init__(self, ctx: BuildContext, shape: tuple[int, ...], *, groups: int = 1, stride: int = 1) -> None:
        """`shape`: outputs, inputs of a group, and the kernel's sides."""
        super().__init__()
        self.weight = Weight(torch.empty(*shape, dtype=ctx.dtype), REPLICATED)
        self.bias = Weight(torch.empty(shape[0], dtype=ctx.dtype), REPLICATED)
        self.groups, self.stride, self.padding = groups, stride, 1 if stride == 2 else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, ...] -> [n, outputs, ...]."""
        convolve = F.conv2d if self.weight.ndim == 4 else F.conv1d
        return convolve(x, self.weight, self.bias, self.stride, self.padding, groups=self.groups)


class HalfStep(Layer):
    """down(up * act(gate)) of the norm."""

    def __init__(self, ctx: BuildContext, size: int, inner: int, act: str) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(ctx, size, EPS)
        self.gate_up_proj = ReplicatedLinear(ctx, size, 2 * inner)
        self.down_proj = ReplicatedLinear(ctx, inner, size)
        self.act = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, T, C] -> [n, T, C]."""
        up, gate = self.gate_up_proj(self.layer_norm(x)).chunk(2, dim=-1)
        return self.down_proj(up * self.act(gate))  # type: ignore[no-any-return]


class BiasedAttention(Layer):
    """Attention of all positions to all, with a bias for each pair."""

    def __init__(self, ctx: BuildContext, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (ReplicatedLinear(ctx, size, size) for _ in range(4))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """[n, T, C] and [1, H, T, T] -> [n, T, C]."""
        query, key, value = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(query, key, value, bias)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class GatedConvolution(Layer):
    """A gate, a convolution of each channel over positions so far, one of all channels, an activation, another."""

    def __init__(self, ctx: BuildContext, size: int, kernel: int, acts: Sequence[str]) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(ctx, size, EPS)
        self.gate = PlainConvolution(ctx, (2 * size, size, 1))
        self.b1, self.b2 = (Weight(torch.empty(1, size, 1, dtype=ctx.dtype), REPLICATED) for _ in range(2))
        self.dw_conv = PlainConvolution(ctx, (size, 1, kernel), groups=size)
        self.pw_conv = PlainConvolution(ctx, (size, size, 1))
        self.last = PlainConvolution(ctx, (size, size, 1))
        self.before, (glu, act) = kernel - 1, (activation(name) for name in acts)
        self.glu, self.act = glu, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, T, C] -> [n, T, C]."""
        kept, gate = self.gate(self.layer_norm(x).transpose(1, 2)).chunk(2, dim=1)
        y = F.pad((kept + self.b1) * self.glu(gate + self.b2), (self.before, 0))
        return self.last(self.act(self.pw_conv(self.dw_conv(y)))).transpose(1, 2)  # type: ignore[no-any-return]


class Phi4SoundLayer(Layer):
    """Half a feed-forward layer, attention, a convolution, half a feed-forward layer, a norm."""

    def __init__(
        self, feeds: Sequence[HalfStep], self_attn: BiasedAttention, conv: GatedConvolution, norms: Sequence[LayerNorm]
    ) -> None:
        super().__init__()
        self.feed_forward_in, self.feed_forward_out = feeds
        self.layer_norm_att, self.layer_norm = norms
        self.self_attn, self.conv = self_attn, conv

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """[n, T, C] -> [n, T, C]."""
        x = x + 0.5 * self.feed_forward_in(x)
        x = x + self.self_attn(self.layer_norm_att(x), bias)
        x = x + self.conv(x)
        return self.layer_norm(x + 0.5 * self.feed_forward_out(x))  # type: ignore[no-any-return]


class Phi4Ears(MediaEncoder):
    """Each sound goes through the layers alone. Its tokens are those of a prompt without pictures."""

    rules = (
        (r"^embed_tokens_extend\.audio_embed\.", ""),
        (r"^encoder\.encoder_embedding\.global_", ""),
        (r"^encoder\.embed\.conv\.", "convolutions."),
        (r"^encoder\.embed\.out\.", "out."),
        (r"^encoder\.relative_attention_bias_layer\.bias_values\.", "apart."),
        (r"^encoder\.encoders\.", "layers."),
        (r"\.glu\.ext_pw_conv_1d\.", ".gate."),
        (r"\.glu\.", "."),
        (r"\.dw_sep_conv_1d\.", "."),
        (r"\.ext_pw_conv_1d\.", ".last."),
        (r"^(up|down)_proj_for_speech\.", r"\1."),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        where, own = f"{info.directory}/config.json: audio_config", info.hf_config["audio_config"]
        check(own, _FIELDS, where)
        for name, served in _FIXED.items():
            if own.get(name, served) != served:
                raise UnsupportedError(f"{where}.{name}={own[name]}; {served} is supported", param="model")
        size, heads = int(own.get("hidden_size", 1024)), int(own.get("num_attention_heads", 16))
        channels = [int(own.get(f"{name}_out_channel", 1024)) for name in ("ext_pw", "depthwise_separable")]
        if size % heads or channels != [size, size]:
            raise CheckpointError(f"{where}: {heads} heads and {channels} channels of {size}", param="model")
        self.num_mels, self.most_apart = int(own.get("input_size", 80)), int(own.get("bias_max_distance", 1000))
        self.device, self.dtype = ctx.device, ctx.dtype
        self.mean, self.invstd = (Weight(torch.empty(self.num_mels, dtype=ctx.dtype), REPLICATED) for _ in range(2))
        planes = int(own.get("nemo_conv_channels", 1024))
        self.nemo_act = activation(str(own.get("nemo_activation", "relu")))
        parts = {"0": PlainConvolution(ctx, (planes, 1, 3, 3), stride=2)}
        for index in range(2, 3 * _HALVINGS - 1, 3):
            parts[str(index)] = PlainConvolution(ctx, (planes, 1, 3, 3), groups=planes, stride=2)
            parts[str(index + 1)] = PlainConvolution(ctx, (planes, planes, 1, 1))
        self.convolutions = nn.ModuleDict(parts)
        self.out = ReplicatedLinear(ctx, planes * halved(self.num_mels, _HALVINGS), size)
        self.apart = ReplicatedTable(ctx, 2 * self.most_apart, heads)
        act, acts = (
            str(own.get("activation", "swish")),
            [str(own.get(n, "swish")) for n in ("conv_glu_type", "conv_activation")],
        )
        wide, kernel = int(own.get("intermediate_size", 1536)), int(own.get("kernel_size", 3))
        self.layers = nn.ModuleList(
            Phi4SoundLayer(
                [HalfStep(ctx, size, wide, act) for _ in range(2)],
                BiasedAttention(ctx, size, heads),
                GatedConvolution(ctx, size, kernel, acts),
                [LayerNorm(ctx, size, EPS) for _ in range(2)],
            )
            for _ in range(int(own.get("num_blocks", 24)))
        )
        self.up = ReplicatedLinear(ctx, size, info.hidden_size)
        self.down = ReplicatedLinear(ctx, info.hidden_size, info.hidden_size)

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        heard = torch.cat([self._heard(sound.pixels.to(self.dtype)) for sound in pictures])
        return self.down(F.gelu(self.up(heard)))[None]  # type: ignore[no-any-return]

    def _heard(self, features: torch.Tensor) -> torch.Tensor:
        """[mels, frames] -> [n, C]; what is behind the sound in its last stretch is seen, too."""
        x = ((features.T - self.mean) * self.invstd)[None, None]
        for name, convolution in self.convolutions.items():
            x = convolution(x)
            if name == "0" or int(name) % 3 == 0:
                x = self.nemo_act(x)
        x = self.out(x[0].transpose(0, 1).flatten(1))
        count, each = len(x), min(len(x), MOST_POSITIONS)
        x = F.pad(x, (0, 0, 0, -count % each)).view(-1, each, x.shape[1])
        bias = self._bias(each)
        for layer in self.layers:
            x = layer(x, bias)
        return x.flatten(0, 1)[:count]

    def _bias(self, count: int) -> torch.Tensor:
        """[1, H, count, count]."""
        places = torch.arange(count, device=self.device)
        apart = (places - places[:, None]).clamp(-self.most_apart, self.most_apart - 1)
        return self.apart(apart + self.most_apart).permute(2, 0, 1)[None]  # type: ignore[no-any-return]

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return -(-grid[2] // FRAMES_EACH)

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        frames = FRAMES_EACH * max(1, num_tokens)
        return Picture(torch.zeros(self.num_mels, frames, device=self.device), (1, 1, frames))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; what projects sounds beside pictures is left out."""
        return [] if "_for_vision_speech." in name else super().own_tensors(name, tensor)
