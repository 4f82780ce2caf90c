"""A model of transformers without weights: its modules, with parameters on the meta device and real buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, UnsupportedError
from app.layers.context import BuildContext


@dataclass(slots=True, frozen=True)
class Skeleton:
    """The whole model, and the part of it that gives hidden states."""

    hf: Any  # PreTrainedModel
    trunk: Any  # its base model
    tp_plan: dict[str, str]  # names with * for layers -> style
    tied: bool


def build_skeleton(ctx: BuildContext, info: ModelInfo) -> Skeleton:
    """UnsupportedError names what transformers lacks, CheckpointError a config.json that it cannot read."""
    import transformers
    from accelerate import init_empty_weights

    kind = getattr(transformers, info.architecture, None)
    if kind is None:
        raise UnsupportedError(f"transformers has no {info.architecture}", param="model")
    config = _configuration(info, kind)
    with torch.device("cpu"), init_empty_weights(include_buffers=False):
        hf = kind._from_config(config, dtype=ctx.dtype, attn_implementation="eager").eval()
    hf.tie_weights()
    trunk = getattr(hf, hf.base_model_prefix, None)
    if trunk is None or trunk is hf:
        raise UnsupportedError(f"{info.architecture} has no base model under its head", param="model")
    head = hf.get_output_embeddings()
    tied = head is not None and head.weight is hf.get_input_embeddings().weight
    return Skeleton(hf, trunk, dict(getattr(hf, "_tp_plan", None) or {}), tied)


def _configuration(info: ModelInfo, kind: Any) -> Any:
    """The configuration of the language model, as transformers reads it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(info.directory, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot read {info.directory}/config.json: {error}", param="model"
        ) from error
    wanted = kind.config_class
    if not isinstance(config, wanted) and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if not isinstance(config, wanted):
        raise CheckpointError(
            f"{info.directory}/config.json is a {type(config).__name__}, {info.architecture} needs {wanted.__name__}",
            param="model",
        )
    config.use_cache = False
    return config


def place_buffers(hf: nn.Module, device: torch.device) -> None:
    """Move what is computed, not loaded, to the device."""
    for module in hf.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and not value.is_meta:  # a forward pass sets it anew
                setattr(module, name, value.to(device))
