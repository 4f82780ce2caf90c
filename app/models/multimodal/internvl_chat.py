"""InternVL 2.5 to 3.5 in the layout in which they are published: the same model under other names."""

from __future__ import annotations

from collections.abc import Iterable

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.multimodal.base import MediaEncoder
from app.models.multimodal.internvl import InternEncoder
from app.models.multimodal.over_text import MediaOverText

PARTS = ("q_proj", "k_proj", "v_proj")
# What config.json may say, and what alone is built: how patches are merged, and whose hidden states are read.
_BUILT = {"ps_version": "v2", "select_layer": -1}
_USUAL = {"ps_version": "v1", "select_layer": -1}  # where config.json leaves them out


class InternChatEncoder(InternEncoder):
    """Queries, keys and values are stored in one tensor."""

    rules = (
        *InternEncoder.rules,
        (r"^tower\.embeddings\.position_embedding$", "tower.positions"),
        (r"\.attn\.proj\.", ".attn.o_proj."),
        (r"\.ls([12])$", r".scale\1"),
        (r"^mlp1\.0\.", "projector_norm."),
        (r"^mlp1\.1\.", "projector.fc1."),
        (r"^mlp1\.3\.", "projector.fc2."),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        for name, built in _BUILT.items():
            told = info.hf_config.get(name)
            if (found := _USUAL[name] if told is None else told) != built:
                raise UnsupportedError(f"{info.architecture} with {name}={found}; {built} is supported", param="model")
        super().__init__(ctx, info)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder."""
        for own, stored in super().own_tensors(name, tensor):
            head, found, leaf = own.rpartition(".attn.qkv.")
            if not found:
                yield own, stored
                continue
            for part, third in split_rows(stored, dict.fromkeys(PARTS, self.tower.size)):
                yield f"{head}.attn.{part}.{leaf}", third


class InternVLChatModel(MediaOverText):
    """InternVL over Qwen 2.5 or 3, or Llama."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return InternChatEncoder(ctx, info)
