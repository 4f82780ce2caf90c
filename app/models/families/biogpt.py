"""BioGPT: OPT with scaled embeddings, a layer norm behind the last layer, and names of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.families.opt import FAIRSEQ_NAMES, OFFSET

_NAMES: list[Rule] = [(r"^biogpt\.", "model."), (r"^output_projection\.", "lm_head."), *FAIRSEQ_NAMES]


class BioGptForCausalLM(CausalLM):
    """Biases everywhere but in the head."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json, whose `layer_norm_eps` no norm takes."""
        scales = bool(info.hf_config.get("scale_embedding", True))
        return replace(
            DecoderSettings.from_info(info, tied=True, hidden_act="gelu"),
            norm_eps=1e-5,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            rope_types=(NO_ROPE,) * info.num_layers,
            num_positions=info.max_position_embeddings + OFFSET,
            position_offset=OFFSET,
            embedding_scale=math.sqrt(info.hidden_size) if scales else 1.0,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """BioGPT's names as ours."""
        return [(renamed(name, _NAMES), tensor)]
