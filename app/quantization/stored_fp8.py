"""Weights that a checkpoint holds in fp8 (e4m3), with scales that multiply them: one for a tensor, for each output or
for each block; DeepSeek's, compressed-tensors' and others' alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.kernels.gemm.fp8 import FP8
from app.quantization.base import QuantMethod, WeightShares
from app.quantization.forms import Fp8BlockForm, Fp8RowForm, WeightForm

PER_TENSOR = (0, 0)
PER_OUTPUT = (1, 0)


@dataclass(slots=True, frozen=True)
class StoredFp8(QuantMethod):
    """One weight. Activations are quantized as they arrive, unless the checkpoint brings a scale for them."""

    dtype: torch.dtype  # the type that the model computes in
    block: tuple[int, int]  # outputs and inputs that share a scale; or PER_TENSOR, PER_OUTPUT
    scale: str = "weight_scale"
    input_scale: str | None = None  # the name of a static one
    unused: tuple[str, ...] = ()
    most: float | None = None  # beyond which activations are cut off before they are quantized
    any_shape: bool = False  # scales of blocks lie in other dimensions than these two, in the same order
    rounds_inputs: bool = True  # or activations stay as they are

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        dims = {PER_TENSOR: (Dim("part"),), PER_OUTPUT: (Dim("output"), Dim("unit"))}
        scale = dims.get(self.block) or self._blocks
        leaves = (
            Leaf("weight", FP8, (Dim("output"), Dim("input"))),
            Leaf(self.scale, torch.float32, scale, any_shape=self.any_shape or self.block == PER_OUTPUT, dummy=0.02),
        )
        if self.input_scale is None:
            return leaves
        return (*leaves, Leaf(self.input_scale, torch.float32, (Dim("part"),), dummy=0.05))

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        weight, scale = stored["weight"], stored[self.scale]
        static = None if self.input_scale is None else stored[self.input_scale].max()  # one that holds for all parts
        if self.block in (PER_TENSOR, PER_OUTPUT):
            scale = shares.rows_of_parts(scale) if self.block == PER_TENSOR else scale
            if not self.rounds_inputs:
                return Fp8BlockForm(weight, scale, (1, max(1, shares.num_inputs)), self.dtype, rounds_inputs=False)
            return Fp8RowForm(weight, scale, self.dtype, static, self.most)
        outputs, inputs = self._blocks
        scale, rows = shares.spread(scale, 0, outputs)
        scale, columns = shares.spread(scale, 1, inputs)
        return Fp8BlockForm(weight, scale, (rows, columns), self.dtype, self.rounds_inputs)

    @property
    def _blocks(self) -> tuple[Dim, Dim]:
        return Dim("output", self.block[0]), Dim("input", self.block[1])
