"""Holds what an adapter has of a layer beside two matrices: magnitudes (DoRA: Liu et al., 2024), biases, the whole
weight of a classifier's head. What becomes of them depends on the base model's weights (worker/lora/fitting.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch

from app.checkpoints.adapters.adapter_config import PARAM
from app.errors import CheckpointError, UnsupportedError
from app.layers.adapted_layer import AdaptedLayer
from app.layers.experts.expert_linear import ExpertLinear
from app.layers.replicated import ReplicatedLinear
from app.layers.vocab import VocabShard

SIDES = ("magnitude", "second_bias", "bias", "weight", "base")  # as ModuleExtras has them
Places = Callable[[str, torch.Tensor], Iterator[tuple[AdaptedLayer, str, torch.Tensor]]]  # of a side's tensor


@dataclass(slots=True, frozen=True)
class LayerChange:
    """Holds what an adapter has of one part of a layer, this rank's shares, in fp32; None: it has not."""

    module: str  # its name in the checkpoint
    layer: AdaptedLayer
    part: str
    scale: float = 1.0  # of the product of its two matrices, and so of the second one's bias
    magnitude: torch.Tensor | None = None  # [N]
    second_bias: torch.Tensor | None = None  # [N]
    bias: torch.Tensor | None = None  # [N], in place of the layer's
    weight: torch.Tensor | None = None  # [N, K], the same
    base: torch.Tensor | None = None  # a table's rows of this rank, which are to be the model's own

    def check(self) -> None:
        """UnsupportedError, CheckpointError name what the layer has no place for."""
        layer, inputs = self.layer, self.layer.input_share
        if isinstance(layer, ExpertLinear):
            self._refuse("of experts low-rank matrices are taken, and nothing beside them")
        if self.magnitude is not None and layer.is_streamed:
            self._refuse("DoRA on a layer whose weight stays in host memory (cpu_offload_gb) is not supported")
        if self.bias is not None and not layer.quantized_parts[self.part].has_bias:
            raise CheckpointError(f"{self.module}: a bias for a layer that has none", param=PARAM)
        if self.weight is not None:
            if not isinstance(layer, ReplicatedLinear):
                self._refuse("modules_to_save: whole modules are taken of classifiers' heads alone")
            self._check_inputs(self.weight, inputs.whole)
        if self.base is not None:
            if not isinstance(layer, VocabShard):
                self._refuse("a whole matrix beside the low-rank ones is not supported")
            self._check_inputs(self.base, layer.inputs.whole)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(f"{self.module}: {what}", param=PARAM)

    def _check_inputs(self, matrix: torch.Tensor, expected: int) -> None:
        if matrix.shape[1] != expected:
            what = f"a whole matrix of {matrix.shape[1]} inputs; the layer has {expected}"
            raise CheckpointError(f"{self.module}: {what}", param=PARAM)


def changes_of(module: str, tensors: Mapping[str, torch.Tensor], places: Places, scale: float) -> Iterator[LayerChange]:
    """One for each part of a layer that a module's tensors go to. CheckpointError names one of another size, or that
    holds no numbers."""
    found: dict[tuple[AdaptedLayer, str], dict[str, torch.Tensor]] = {}
    for side, tensor in tensors.items():
        for layer, part, rows in places(side, tensor):
            share = layer.output_shares[part]
            if side == "base" and layer.kind == "embedding":
                share = layer.input_share
            if len(rows) != share.whole:
                what = f"its {side} has {len(rows)} rows; the layer has {share.whole}"
                raise CheckpointError(f"{module}: {what}", param=PARAM)
            own = rows[share.start : share.start + share.size]
            own = own if side == "base" or own.is_meta else own.to(torch.float32, copy=True)
            if not (own.is_meta or own.isfinite().all()):
                raise CheckpointError(f"{module}: its {side} holds numbers that are none", param=PARAM)
            found.setdefault((layer, part), {})[side] = own
    for (layer, part), sides in found.items():
        yield LayerChange(module, layer, part, scale, **sides)
