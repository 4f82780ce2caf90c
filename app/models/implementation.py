"""Decides whose modules run a model: our own, or those of transformers (`model_impl`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.transformers_catalog import entry_of
from app.errors import UnsupportedError
from app.models import MODELS
from app.models.decoder_settings import readable
from app.registry import Registry

if TYPE_CHECKING:  # the choice alone needs no torch
    from app.layers.context import BuildContext
    from app.models.base import EngineModel

_BACKEND: Registry[Callable[[BuildContext, ModelInfo], EngineModel]] = Registry(
    "implementation", {"transformers": "app.models.transformers_backend.model:TransformersForCausalLM"}
)
_LAYER_TYPES = ("full_attention", "sliding_attention")


def runs_natively(info: ModelInfo) -> bool:
    """True if a language model runs on our own modules."""
    return info.impl != "transformers" and info.architecture in MODELS


def check_settings(info: ModelInfo) -> None:
    """Checks what only the family's file knows of config.json, before weights are downloaded. UnsupportedError and
    CheckpointError name what is unknown, wrong or missing."""
    if runs_natively(info):
        readable(MODELS.load(info.architecture).settings, info)


def causal_model(info: ModelInfo) -> Callable[[BuildContext, ModelInfo], EngineModel]:
    """Returns what makes a language model; UnsupportedError lists what exists, or says why transformers' modules
    cannot."""
    if info.impl == "native" or runs_natively(info):
        return MODELS.load(info.architecture)
    reason = transformers_refusal(info)
    if reason is not None and info.impl == "transformers":
        raise UnsupportedError(f"model_impl=transformers cannot run {info.architecture}: {reason}", param="model_impl")
    return _BACKEND.load("transformers") if reason is None else MODELS.load(info.architecture)


def transformers_refusal(info: ModelInfo) -> str | None:
    """Why transformers' modules cannot run this model here, as far as its config.json and their source say it."""
    entry = entry_of(info.architecture)
    hf = info.hf_config
    if entry is None:
        if hf.get("auto_map"):
            return (
                "the checkpoint brings code of its own, which is not run, and transformers has no such language model"
            )
        return "transformers has no such language model"
    if hf.get("is_encoder_decoder") or hf.get("add_cross_attention"):
        return "attention to an encoder's tokens"
    if entry.keeps_state:
        return "it keeps a recurrent state, not only keys and values of tokens"
    if entry.is_encoder:
        return "an encoder, which generates no text"
    if not entry.takes_attention:
        return "its attention there does not take an implementation from outside"
    odd = sorted({str(kind) for kind in hf.get("layer_types") or ()} - set(_LAYER_TYPES))
    if odd:
        return f"layers of type {', '.join(odd)}"
    if hf.get("num_kv_shared_layers"):
        return "layers that share keys and values"
    return None
