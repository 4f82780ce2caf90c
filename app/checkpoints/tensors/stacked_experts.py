"""Checkpoints that hold all experts of a layer in one tensor: each expert's part of it under a name of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import viewed

Cuts = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]  # part -> the view of it in an expert's tensor

# An expert's [2 I, C] has gate's rows above up's, or (GPT-OSS) both in turn. Biases and scales have the same rows.
HALVES: Cuts = {"gate_proj": lambda x: x[: len(x) // 2], "up_proj": lambda x: x[len(x) // 2 :]}
IN_TURN: Cuts = {"gate_proj": lambda x: x[0::2], "up_proj": lambda x: x[1::2]}
DOWN: Cuts = {"down_proj": lambda x: x}


def transposed_cuts(cuts: Cuts) -> Cuts:
    """The same of matrices that are stored the other way round."""
    return {part: lambda x, cut=cut: cut(x.t()) for part, cut in cuts.items()}  # type: ignore[misc]


def flattened_cuts(cuts: Cuts) -> Cuts:
    """The same of rows that are stored as blocks of bytes, [rows, blocks, bytes]."""
    return {part: lambda x, cut=cut: cut(x.flatten(1)) for part, cut in cuts.items()}  # type: ignore[misc]


def unstacked(experts: str, leaf: str, tensor: StoredTensor, cuts: Cuts) -> Iterator[tuple[str, StoredTensor]]:
    """Parts of a tensor [E, ...], for `experts` as in `model.layers.0.mlp.experts`. Views: nothing is read here."""
    for number, expert in enumerate(tensor.mapped):
        for part, cut in cuts.items():
            yield f"{experts}.{number}.{part}.{leaf}", viewed(tensor, cut(expert))


def stacked_parts(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]] | None:
    """The parts of `...mlp.experts.gate_up_proj`, gate above up, or `...mlp.experts.down_proj`; None: it is neither."""
    for part, cuts in (("gate_up_proj", HALVES), ("down_proj", DOWN)):
        if name.endswith(f".mlp.experts.{part}"):
            return unstacked(name.removesuffix(f".{part}"), "weight", tensor, cuts)
    return None
