"""The encoders of sounds of Qwen2.5-Omni, Qwen3-Omni and Qwen3-ASR: convolutions and positions chunk by chunk, and
attention within a chunk (2.5), or within a window of several (3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from app.checkpoints.fields.kinds import check
from app.checkpoints.fields.sound_json import SOUND_FIELDS
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import CheckpointError
from app.kernels.attention.encoder import plan_encoder
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.sinusoidal import SinusoidalPositions
from app.layers.weight import REPLICATED, Weight
from app.media.audio.qwen_omni import halved
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.sound_layers import EPS, TOWER, FrameConvolution, SoundSettings, sound_blocks, with_key_bias
from app.models.multimodal.vision_layers import PlainBlock, Span

Grid = tuple[int, int, int]
_CHUNKS_AT_ONCE = 64  # that convolutions of all mels have memory for
_UNUSED = ("audio_bos_eos_token.", "positional_embedding.")


class OmniEars(MediaEncoder):
    """Convolves `chunk` frames at a time, which get positions as if they were all; the kinds say how."""

    rules = ((r"^audio_tower\.", ""), *TOWER)

    def __init__(self, ctx: BuildContext, info: ModelInfo, defaults: Mapping[str, int]) -> None:
        super().__init__()
        where, own = f"{info.directory}/config.json: audio_config", info.hf_config["audio_config"]
        check(own, SOUND_FIELDS, where)
        self.extra = {name: int(own.get(name, usual)) for name, usual in defaults.items()}
        self.settings = s = SoundSettings.of({"num_mel_bins": 128, **own}, where)
        self.chunk = 2 * self.extra["n_window"]
        if s.size % s.num_heads or s.size % 2:
            raise CheckpointError(f"{where}: {s.num_heads} heads of {s.size}", param="model")
        self.device, self.dtype = ctx.device, ctx.dtype
        self.positions = SinusoidalPositions(self.chunk, s.size, -1, ctx.dtype, ctx.device)
        self.layers = sound_blocks(ctx, s)
        self.ln_post = LayerNorm(ctx, s.size, EPS)

    def convolved(self, sound: torch.Tensor) -> list[torch.Tensor]:
        """Features [mels, frames] -> positions [n, C] of each chunk."""
        raise NotImplementedError

    def windows(self, chunks: Sequence[torch.Tensor]) -> list[int]:
        """Positions of each stretch of a sound's that see each other."""
        raise NotImplementedError

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        chunked = [self.convolved(sound.pixels.to(self.dtype)) for sound in pictures]
        windows = [count for chunks in chunked for count in self.windows(chunks)]
        x = torch.cat([chunk for chunks in chunked for chunk in chunks])
        span = Span(plan_encoder([0, *accumulate(windows)], x.device))
        for layer in self.layers.values():
            x = layer(x, span)
        sounds = torch.split(x, [sum(len(chunk) for chunk in chunks) for chunks in chunked])
        return self.tokens(sounds)[None]

    def tokens(self, sounds: Sequence[torch.Tensor]) -> torch.Tensor:
        """Positions [n, C] of each sound behind the layers -> tokens of all."""
        raise NotImplementedError

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        frames = 1
        while self.num_tokens((1, 1, 2 * frames)) <= num_tokens:
            frames *= 2
        frames = max(4, frames)
        return Picture(torch.zeros(self.settings.num_mels, frames, device=self.device), (1, 1, frames))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; positions are computed."""
        found = super().own_tensors(name, tensor)
        return [pair for pair in found if not pair[0].startswith(_UNUSED)]


class Qwen2_5OmniEars(OmniEars):
    """Whisper's convolutions; the mean of every two positions is a token."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info, {"n_window": 100, "output_dim": 3584})
        s = self.settings
        self.conv1 = FrameConvolution(ctx, s.num_mels, s.size, 1)
        self.conv2 = FrameConvolution(ctx, s.size, s.size, 2)
        self.proj = ReplicatedLinear(ctx, s.size, self.extra["output_dim"])

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return halved(grid[2], 1) // 2

    def convolved(self, sound: torch.Tensor) -> list[torch.Tensor]:
        """See OmniEars."""
        found = []
        for chunk in torch.split(sound, self.chunk, dim=1):
            x = F.gelu(self.conv2(F.gelu(self.conv1(chunk[None]))))[0].T
            found.append(x + self.positions.table[: len(x)])
        return found

    def windows(self, chunks: Sequence[torch.Tensor]) -> list[int]:
        """See OmniEars."""
        return [len(chunk) for chunk in chunks]

    def tokens(self, sounds: Sequence[torch.Tensor]) -> torch.Tensor:
        """See OmniEars."""
        pairs = [x[: len(x) // 2 * 2].view(len(x) // 2, 2, -1).sum(1) / 2 for x in sounds]
        return self.proj(self.ln_post(torch.cat(pairs)))  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder."""
        return [pair for own, one in super().own_tensors(name, tensor) for pair in with_key_bias(own, one)]


class PlaneConvolution(Layer):
    """A convolution of three mels and three frames, which keeps every second one of both."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(outputs, inputs, 3, 3, dtype=ctx.dtype), REPLICATED)
        self.bias = Weight(torch.empty(outputs, dtype=ctx.dtype), REPLICATED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, mels, frames] -> [n, outputs, mels / 2, frames / 2]."""
        return F.conv2d(x, self.weight, self.bias, stride=2, padding=1)


class Qwen3OmniEars(OmniEars):
    """Three convolutions of mels and frames; windows of `n_window_infer` frames see each other."""

    pads_chunks = False  # the only chunk of a sound, too, is convolved as long as a whole one

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        usual = {"n_window": 50, "output_dim": 3584, "n_window_infer": 800, "downsample_hidden_size": 480}
        super().__init__(ctx, info, usual)
        s, channels = self.settings, self.extra["downsample_hidden_size"]
        if self.extra["n_window_infer"] < self.chunk:
            raise CheckpointError(
                f"{info.directory}/config.json: audio_config: n_window_infer is less than a chunk", param="model"
            )
        self.conv2d1 = PlaneConvolution(ctx, 1, channels)
        self.conv2d2, self.conv2d3 = (PlaneConvolution(ctx, channels, channels) for _ in range(2))
        self.conv_out = ReplicatedLinear(ctx, channels * halved(s.num_mels, 3), s.size, bias=False)
        self.projector = PlainBlock(ctx, s.size, s.size, s.act, out=self.extra["output_dim"])

    rules = (
        *OmniEars.rules,
        (r"^proj(\d)\.", r"projector.fc\1."),
        (r"^multi_modal_projector\.linear_(\d)\.", r"projector.fc\1."),
    )

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        whole_chunks, rest = divmod(grid[2], self.chunk)
        return whole_chunks * halved(self.chunk, 3) + halved(rest, 3)

    def convolved(self, sound: torch.Tensor) -> list[torch.Tensor]:
        """See OmniEars."""
        lengths = [chunk.shape[1] for chunk in torch.split(sound, self.chunk, dim=1)]
        whole = self.chunk if self.pads_chunks or len(lengths) > 1 else lengths[0]
        x = F.pad(sound, (0, len(lengths) * whole - sound.shape[1]))
        x = x.view(len(x), len(lengths), whole).transpose(0, 1).unsqueeze(1)
        found: list[torch.Tensor] = []
        for part in torch.split(x, _CHUNKS_AT_ONCE):
            y = F.gelu(self.conv2d3(F.gelu(self.conv2d2(F.gelu(self.conv2d1(part))))))
            y = self.conv_out(y.permute(0, 3, 1, 2).flatten(2))
            found += (y + self.positions.table[: y.shape[1]]).unbind()
        return [chunk[: halved(length, 3)] for chunk, length in zip(found, lengths, strict=True)]

    def windows(self, chunks: Sequence[torch.Tensor]) -> list[int]:
        """See OmniEars."""
        longest = max(len(chunk) for chunk in chunks) * (self.extra["n_window_infer"] // self.chunk)
        whole_windows, rest = divmod(sum(len(chunk) for chunk in chunks), longest)
        return [longest] * whole_windows + [rest] * bool(rest)

    def tokens(self, sounds: Sequence[torch.Tensor]) -> torch.Tensor:
        """See OmniEars."""
        return self.projector(self.ln_post(torch.cat(list(sounds))))  # type: ignore[no-any-return]


class Qwen3AsrEars(Qwen3OmniEars):
    """The same; every chunk is convolved as long as a whole one."""

    pads_chunks = True
