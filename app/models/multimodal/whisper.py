"""Whisper (Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022), of all sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.layers.context import BuildContext
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder_layers.cross import CrossLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.encoder_decoder import FEATURE, EncoderDecoder, InputEncoder, encoder_info
from app.models.multimodal.sound_layers import EPS, TOWER, SoundSettings, SoundTower, with_key_bias
from app.records.alignment_heads import AlignmentHeads

_NAMES: list[Rule] = [
    (r"^(?:model\.)?decoder\.", "model."),
    (r"^proj_out\.", "lm_head."),
    (r"^model\.layer_norm\.", "model.norm."),
    (r"\.(self_attn|encoder_attn)\.out_proj\.", r".\1.o_proj."),
    (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
]


class WhisperEncoder(InputEncoder):
    """The tower, of one sound or several."""

    rules = TOWER
    is_capturable = True

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        self.info = encoder_info(info)
        self.tower = SoundTower(ctx, SoundSettings.of(info.hf_config, f"{info.directory}/config.json"))
        self._device = ctx.device

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """See InputEncoder."""
        return self.tower(torch.stack(list(inputs)))  # type: ignore[no-any-return]

    def largest(self) -> torch.Tensor:
        """See InputEncoder."""
        return torch.zeros(self.info.shape, device=self._device)

    def constants(self) -> object:
        """See InputEncoder."""
        return self.tower.plan_whole(1)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See InputEncoder."""
        return with_key_bias(f"tower.{renamed(name, self.rules)}", tensor)


class WhisperForConditionalGeneration(EncoderDecoder):
    """Learned positions, layer norms, biases everywhere but for keys."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp, layer=CrossLayer)
    features = (FEATURE, "app.worker.media.alignment:create")

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.alignment = AlignmentHeads.of(info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return replace(
            DecoderSettings.from_info(info, tied=True, hidden_act="gelu", norm_eps=EPS),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            rope_types=(NO_ROPE,) * info.num_layers,
            num_positions=info.max_position_embeddings,
            cross_positions=encoder_info(info).num_positions,
        )

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> InputEncoder:
        """See EncoderDecoder."""
        return WhisperEncoder(ctx, info)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Whisper's names as ours."""
        return with_key_bias(renamed(name, _NAMES), tensor)
