"""Decoders that pool without a KV cache; transformers judges their vectors in worker/pooling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.blocks import Blocks, picture_attention
from app.models.decoder_pooling import DecoderForPooling
from app.models.families.qwen3 import Qwen3ForCausalLM
from app.worker.attention.backend import select_attention
from tests.tiny_encoders import tiny_encoder

CPU = torch.device("cpu")
CONTEXT = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())


class OwnAttention(Qwen3ForCausalLM):
    """A family, as a package's may be, whose config.json says qwen3."""

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Attention that is not the usual one."""
        return replace(super().blocks_of(info), attention=picture_attention)


class OwnPooling(DecoderForPooling):
    """Its decoder."""

    family = OwnAttention


def test_attention_of_a_familys_own_is_not_replaced_by_the_one_without_a_cache() -> None:
    info = ModelInfo.from_directory(str(tiny_encoder("qwen3")))
    OwnPooling(CONTEXT, info)
    whole = replace(CONTEXT, whole_prompts=True)
    DecoderForPooling(whole, info)
    with pytest.raises(UnsupportedError, match="enable_prefix_caching=False with Qwen3Model") as error:
        OwnPooling(whole, info)
    assert error.value.param == "enable_prefix_caching"
