"""GPT-J and CodeGen: attention and feed-forward layer beside each other, a part of each head turned in pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.tensor_view import pairs_to_halves, rows_of
from app.errors import CheckpointError, UnsupportedError
from app.layers.rope_scaling import RopeSettings
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_layers.parallel import ParallelLayer
from app.models.decoder_settings import DecoderSettings

_NAMES: list[Rule] = [
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
    (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
]
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attn.causal_mask", ".attn.embed_positions")
_BLOCKS = 4  # of CodeGen's rows, which lie as the devices held them that it was trained on


class GPTJForCausalLM(CausalLM):
    """The head has a bias, attention has none."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp, layer=ParallelLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError where no part of a head turns."""
        settings = DecoderSettings.from_info(info, hidden_act="gelu_new", norm_eps=1e-5)
        turns = int(info.hf_config.get("rotary_dim", 64))
        if turns < 2 or turns % 2 or turns > settings.head_dim:
            raise UnsupportedError(f"rotary_dim={turns} of heads of {settings.head_dim}", param="model")
        return replace(settings, mlp_bias=True, head_bias=True, rotary_dim=turns)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """A base of 10,000, which config.json does not name."""
        context = info.max_position_embeddings
        return lambda _: RopeSettings(settings.rotary_dim, 10_000.0, "default", context, max_model_len)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Our names, dimensions of queries and keys in our order."""
        if name.endswith(_BUFFERS):
            return
        own = renamed(name, _NAMES)
        turns = ".q_proj." in own or ".k_proj." in own
        yield own, pairs_to_halves(tensor, settings.head_dim, settings.rotary_dim) if turns else tensor


class CodeGenForCausalLM(GPTJForCausalLM):
    """The same, whose queries, values and keys lie block by block in one matrix."""

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """GPT-J's, `qkv_proj` taken apart."""
        head, found, leaf = name.rpartition(".attn.qkv_proj.")
        if not found:
            yield from GPTJForCausalLM.tensors(settings, name, tensor)
            return
        for place, part in enumerate(("q_proj", "v_proj", "k_proj")):

            def choose(x: torch.Tensor, place: int = place) -> torch.Tensor:
                if len(x) % (3 * _BLOCKS):
                    raise CheckpointError(f"{name} has {len(x)} rows, no {_BLOCKS} blocks of three", param="model")
                return x.view(_BLOCKS, 3, -1, *x.shape[1:])[:, place].flatten(0, 1)

            yield from GPTJForCausalLM.tensors(settings, f"{head}.attn.{part}.{leaf}", rows_of(tensor, choose))
