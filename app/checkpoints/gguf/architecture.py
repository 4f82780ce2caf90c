"""Describes what llama.cpp calls the parts of one family, and what it leaves out because its own code knows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys
from app.errors import UnsupportedError

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.((?:shortconv\.)?\w+)\.(weight|bias)")
_BARE = re.compile(r"blk\.(\d{1,6})\.(\w+)")  # without a leaf
_ONE_EXPERT = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)\.(\d{1,6})\.weight")  # files of 2023


def _nothing(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {}


def _as_they_are(places: Mapping[str, dict[str, Any]], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(places)


@dataclass(slots=True, frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str
    causal_class: str  # what config.json calls the architecture
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER)  # with the leaf where a family's is another
    config: Mapping[str, Any] = field(default_factory=dict)  # what holds for all models of it
    sizes: Mapping[str, str] = field(default_factory=dict)  # further names in config.json: keys, which must be there
    numbers: Mapping[str, str] = field(default_factory=dict)  # the same of keys that need not be there
    derived: Callable[[Keys, GgufHeader], Mapping[str, Any]] = _nothing  # what is no key's value as it is
    rope: Mapping[str, Any] = field(default_factory=dict)  # what its YaRN has beside the metadata
    attends: bool = True  # False: no layer does, and the metadata have no heads
    pairs: bool = False  # rows of queries and keys lie in the order of rotated pairs
    norm_offset: float = 0.0  # added to norm weights when they were written
    zeros_are_none: bool = False  # of numbers that the metadata have layer by layer, those of layers without such
    plain_norm: str = "-"  # with which the name of one ends that it was not added to
    # What becomes of tensors' places (see `description.py`) by config.json: other parts, orders and numbers.
    arranged: Callable[[Mapping[str, dict[str, Any]], Mapping[str, Any]], dict[str, dict[str, Any]]] = _as_they_are

    def own_name(self, name: str) -> str:
        """The tensor's name in a checkpoint of transformers; UnsupportedError where the family has no such."""
        module, _, leaf = name.rpartition(".")
        if match := _IN_LAYER.fullmatch(name):
            if (own := self.layer_names.get(f"{match[2]}.{leaf}")) is not None:
                return f"model.layers.{match[1]}.{own}"
            if (own := self.layer_names.get(match[2])) is not None:
                return f"model.layers.{match[1]}.{own}.{leaf}"
        elif (match := _BARE.fullmatch(name)) and match[2] in self.layer_names:
            return f"model.layers.{match[1]}.{self.layer_names[match[2]]}"
        elif (match := _ONE_EXPERT.fullmatch(name)) and "ffn_down_exps" in self.layer_names:
            return f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
        elif module in self.layer_names:
            return f"{self.layer_names[module]}.{leaf}"
        elif module in _OUTSIDE:
            return f"{_OUTSIDE[module]}.{leaf}"
        raise UnsupportedError(f"GGUF: {name} is no tensor of a {self.model_type} model known here", param="model")
