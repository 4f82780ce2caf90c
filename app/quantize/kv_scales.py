"""Scales of a KV cache in 8 bits: the largest key and value that calibration texts bring becomes the largest number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from app.errors import CheckpointError, UnsupportedError
from app.kernels.attention import KV_FP8_MAX
from app.loading.quantized_modules import FoundModule
from app.quantize.layerwise import LayerObserver, LoadedLayer

LEAST = 1e-6  # the scale of a head that only ever held zeros


class KVScaleCalibration(LayerObserver):
    """Reads what each attention layer cached. `scales` are tensors of the checkpoint, fp32, by name."""

    def __init__(self, found: Mapping[str, FoundModule], per: Literal["tensor", "head"]) -> None:
        """`found`: the checkpoint's modules by our names; `per`: what has a scale of its own."""
        self._found, self._per = found, per
        self._largest: dict[str, torch.Tensor] = {}  # [2] or [2, Hkv] of each layer, by its name in the checkpoint
        self.scales: dict[str, torch.Tensor] = {}

    def after_batch(self, layer: LoadedLayer) -> None:
        """See LayerObserver."""
        for name, cache in zip(self._names(layer), layer.caches, strict=True):
            largest = self._largest_of(cache)
            before = self._largest.get(name)
            self._largest[name] = largest if before is None else torch.maximum(before, largest)

    def end(self, layer: LoadedLayer) -> None:
        """See LayerObserver. CheckpointError names a layer whose keys or values are not finite."""
        for name in self._names(layer):
            scale = (self._largest[name].float() / KV_FP8_MAX).clamp_(min=LEAST).cpu()
            if not scale.isfinite().all():
                raise CheckpointError(f"--kv: keys or values of {name} are not finite", param="model")
            shape = (1,) if scale.ndim == 1 else (-1, 1, 1)  # as compressed-tensors has them
            for kind, own in zip("kv", scale, strict=True):
                self.scales[f"{name}.{kind}_scale"] = own.reshape(shape).contiguous()

    def _largest_of(self, cache: torch.Tensor) -> torch.Tensor:
        """The largest numbers of a cache [B, 2, Hkv, S, D], or of latents [B, S, D], which stand for both."""
        if cache.ndim == 3:
            if self._per == "head":
                raise UnsupportedError("--kv-scales head: latent attention has one vector for all heads; use tensor")
            return cache.abs().amax().expand(2)
        return cache.abs().amax((0, 2, 3, 4) if self._per == "tensor" else (0, 3, 4))

    def _names(self, layer: LoadedLayer) -> list[str]:
        """The attention layers' names in the checkpoint: those of the modules in them."""
        paths = {module: path for path, module in layer.model.named_modules()}
        names = []
        for attention in layer.model.attention_layers:
            inside = paths[attention] + "."
            module = next((found.name for own, found in self._found.items() if own.startswith(inside)), "")
            name = module.rpartition(".")[0]
            if not name.endswith(".self_attn"):
                raise UnsupportedError(f"--kv: the checkpoint's attention ({module}) is not called self_attn")
            names.append(name)
        return names
