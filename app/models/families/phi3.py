"""Phi-3 and Phi-4: Llama with fused projections in the checkpoint, longrope and partial rotation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import split_rows
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings, one_window


def split_gate_up(settings: DecoderSettings, name: str, tensor: StoredTensor) -> list[tuple[str, StoredTensor]]:
    """`gate_up_proj` as two, the gate first; any other tensor as it is."""
    head, found, leaf = name.rpartition(".gate_up_proj.")
    if not found:
        return [(name, tensor)]
    sizes = dict.fromkeys(("gate_proj", "up_proj"), settings.intermediate_size)
    return [(f"{head}.{part}.{leaf}", one) for part, one in split_rows(tensor, sizes)]


class Phi3ForCausalLM(CausalLM):
    """Every layer has the same window, if any."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return replace(DecoderSettings.from_info(info, norm_eps=1e-5), sliding_windows=one_window(info))

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """`qkv_proj` and `gate_up_proj` are split."""
        head, found, leaf = name.rpartition(".qkv_proj.")
        if not found or leaf in ("k_scale", "v_scale"):
            return split_gate_up(settings, name, tensor)
        heads = {"q_proj": settings.num_heads, "k_proj": settings.num_kv_heads, "v_proj": settings.num_kv_heads}
        parts = split_rows(tensor, {part: count * settings.head_dim for part, count in heads.items()})
        return [(f"{head}.{part}.{leaf}", one) for part, one in parts]
