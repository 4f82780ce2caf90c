"""NV-Embed (v1, v2): Mistral whose tokens see the whole text, and behind it attention to learned vectors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from app.checkpoints.fields.kinds import OBJECT, check, expect, whole
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.layers.context import BuildContext, ForwardContext
from app.layers.latent_queries import LatentQueries
from app.models.decoder_pooling import DecoderForPooling
from app.models.families.mistral import MistralForCausalLM

_BEHIND, _DECODER = "latent_attention_model.", "embedding_model."
_NAMES = (
    (r"^latents$", "latents.weight"),
    (r"^cross_attend_blocks\.0\.norm_context\.", "latent_norm."),
    (r"^cross_attend_blocks\.0\.norm\.", "norm."),
    (r"^cross_attend_blocks\.0\.fn\.to_(q|kv)\.", r"\1_proj."),
    (r"^cross_attend_blocks\.0\.fn\.to_out\.", "o_proj."),
    (r"^cross_attend_blocks\.1\.norm\.", "mlp_norm."),
    (r"^cross_attend_blocks\.1\.fn\.net\.0\.", "mlp.up_gate_proj."),
    (r"^cross_attend_blocks\.1\.fn\.net\.2\.", "mlp.down_proj."),
)
_FUSED = {"kv_proj.": ("k_proj", "v_proj"), "mlp.up_gate_proj.": ("mlp.up_proj", "mlp.gate_proj")}
_SIZES = {
    "num_latents_value": 512,
    "num_cross_heads": 8,
    "hidden_dim": 4096,
    "latent_dim": 4096,
    "cross_dim_head": 4096,
}


class NVEmbedModel(DecoderForPooling):
    """No layer has a window."""

    family = MistralForCausalLM

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, replace(info, hf_config={**info.hf_config, "sliding_window": None}))
        given, file = info.hf_config.get("latent_attention_config") or {}, f"{info.directory}/config.json"
        expect(given, OBJECT, f"{file} is not usable: latent_attention_config")
        check(given, dict.fromkeys(_SIZES, whole(1, 1 << 20)), file, "latent_attention_config.")
        sizes = {name: int(given.get(name) or usual) for name, usual in _SIZES.items()}
        for name in ("hidden_dim", "latent_dim"):
            if sizes[name] != info.hidden_size:
                what = f"latent_attention_config.{name}={sizes[name]} beside hidden_size={info.hidden_size}"
                raise UnsupportedError(f"{info.architecture} with {what}", param="model")
        heads = sizes["num_cross_heads"], sizes["cross_dim_head"]
        self.latent = LatentQueries(ctx, info.hidden_size, sizes["num_latents_value"], *heads)
        self._rows = {"kv_proj.": heads[0] * heads[1], "mlp.up_gate_proj.": 4 * info.hidden_size}

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> vectors of tokens [T, C]."""
        return self.latent(super().forward(input_ids, ctx))  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The decoder's, and those behind it, fused ones apart."""
        if not name.startswith(_BEHIND):
            yield from super().own_tensors(name.removeprefix(_DECODER), tensor)
            return
        own = renamed(name.removeprefix(_BEHIND), _NAMES)
        fused = next((part for part in _FUSED if own.startswith(part)), None)
        parts = (
            ((own, tensor),) if fused is None else split_rows(tensor, dict.fromkeys(_FUSED[fused], self._rows[fused]))
        )
        leaf = "" if fused is None else f".{own.removeprefix(fused)}"
        yield from ((f"latent.{part}{leaf}", rows) for part, rows in parts)
