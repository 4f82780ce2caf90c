"""Computes what comes after the pooling: dense layers, length 1, probabilities. All in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from app.checkpoints.tensors.reader import DirectReader
from app.errors import CheckpointError
from app.loading.load_formats import open_checkpoint
from app.loading.load_formats.pt import open_file
from app.records.pooling_info import DenseInfo, PoolingInfo
from app.records.pooling_params import PoolingParams

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class Dense:
    """activation(x W^T + b) with the weights that a sentence-transformers module saved."""

    def __init__(self, info: DenseInfo, device: torch.device, dummy: bool) -> None:
        self._activation = ACTIVATIONS[info.activation]
        shape = (info.out_features, info.in_features)
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        if dummy:
            generator = torch.Generator(device).manual_seed(0)
            self.weight = torch.randn(shape, device=device, generator=generator) * info.in_features**-0.5
            self.bias = torch.zeros(shape[0], device=device) if info.bias else None
            return
        source = info.directory / info.file
        tensors = open_file(source, DirectReader()) if info.file else open_checkpoint(source)
        weight, bias = ("weight", "bias") if info.file else (f"{info.name}.weight", f"{info.name}.bias")
        wanted = {weight: shape} | ({bias: shape[:1]} if info.bias else {})
        for name, expected in wanted.items():
            found = tensors[name].shape if name in tensors else None
            if found != expected:
                raise CheckpointError(f"{source}: {name} has shape {found}, not {expected}", param="model")
        loaded = {name: tensors[name].narrow(0, 0, shape[0]).float().to(device) for name in wanted}
        self.weight, self.bias = loaded[weight], loaded.get(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self._activation(F.linear(x, self.weight, self.bias))


class EmbeddingHead:
    """Dense layers, then the first `dimensions` entries, then length 1."""

    def __init__(self, info: PoolingInfo, device: torch.device, dummy: bool) -> None:
        self._denses = [Dense(dense, device, dummy) for dense in info.denses]
        self._normalize = info.normalize

    def __call__(self, x: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Pooled fp32 [N, C] -> embeddings [N, E]."""
        for dense in self._denses:
            x = dense(x)
        x = x[:, : params.dimensions]
        normalize = self._normalize if params.use_activation is None else params.use_activation
        return F.normalize(x, dim=1) if normalize else x


class ClassifierHead:
    """The model's logits of the classes, as probabilities."""

    def __init__(self, info: PoolingInfo, classify: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._classify = classify
        self._scores = info.scores

    def __call__(self, x: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Pooled fp32 [N, C] -> scores [N, classes]."""
        logits = self._classify(x).float()
        if params.use_activation is False or self._scores == "identity":
            return logits
        return logits.sigmoid() if self._scores == "sigmoid" else logits.softmax(dim=1)
