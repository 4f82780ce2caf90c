"""Holds what is left of a model of transformers once its layers are exchanged: parameters and stored buffers that know
to be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from app.distributed.parallel_groups import RankGroup
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.vocab import LMHead, VocabEmbedding
from app.layers.weight import REPLICATED, CheckpointTensor, Weight, WeightSpec, expect_shape
from app.models.transformers_backend.linears import over_rows, style_of
from app.models.transformers_backend.names import CheckpointNames, part_ids


class Embedding(VocabEmbedding):
    """Token ids to vectors, under the attributes that transformers' modules ask for."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int [1, T] -> [1, T, C]."""
        if token_ids.is_meta:
            return torch.empty(*token_ids.shape, self.weight.shape[1], dtype=self.weight.dtype, device="meta")
        return VocabEmbedding.forward(self, token_ids)


class Head(LMHead):
    """Vectors to logits."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., C] -> [..., V]."""
        logits: torch.Tensor = over_rows(super().forward, hidden, self.vocab_size)
        return logits


def exchange_ends(hf: Any, ctx: BuildContext, tied: bool) -> None:
    """Our embedding and head for transformers' plain ones."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    names = {module: name for name, module in hf.named_modules(remove_duplicate=False)}
    ours = None
    if type(embedding) is nn.Embedding:
        ours = Embedding(ctx, embedding.num_embeddings, embedding.embedding_dim)
        _put(hf, names[embedding], ours)
    if type(head) is nn.Linear and (ours is not None or not tied):
        own_head = Head(ctx, head.out_features, head.in_features, head.bias is not None)
        if tied and ours is not None:
            own_head.tie(ours)
        _put(hf, names[head], own_head)
    elif tied and ctx.groups.tp.size > 1:
        raise UnsupportedError(
            "its embedding is no plain table and is its head too; tensor_parallel_size=1", param="model"
        )


def _put(hf: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    hf.get_submodule(parent).add_module(leaf, module)


def claim_parameters(hf: Any, ctx: BuildContext, plan: Mapping[str, str], names: CheckpointNames) -> None:
    """Make a Weight of every parameter that is none, and of every stored buffer."""
    twins: dict[nn.Parameter, Weight] = {}
    for path, module in hf.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, Weight):
                if parameter not in twins:
                    twins[parameter] = _weight(hf, f"{path}.{name}", parameter, ctx, plan, names)
                module.register_parameter(name, twins[parameter])
        stored = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in stored:
            buffer = module._buffers.pop(name)
            if buffer is not None:
                module.register_parameter(name, Weight(torch.empty_like(buffer, device="meta"), REPLICATED))


def _dtype(hf: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """fp32 for what the model keeps in it."""
    kept = set(hf._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(hf._keep_in_fp32_modules or ())
    return torch.float32 if any(part in name for part in kept) else dtype


def _weight(
    hf: Any, name: str, parameter: nn.Parameter, ctx: BuildContext, plan: Mapping[str, str], names: CheckpointNames
) -> Weight:
    tp, dtype = ctx.groups.tp, _dtype(hf, name, parameter.dtype)
    style = style_of(name, plan, tp) or style_of(name.rpartition(".")[0], plan, tp)
    matrices = names.matrices(name)
    split = None if style is None or style in _WHOLE else _split_of(style, parameter, tp.size)
    shape = list(parameter.shape)
    if split is not None:
        shape[split.dim] //= tp.size
    if matrices:
        parts = part_ids(name, shape[0], matrices)
        return Weight(torch.empty(shape, dtype=dtype), WeightSpec(partial(_load_part, tp, split, matrices), parts))
    spec = REPLICATED if split is None else WeightSpec(partial(_load_split, tp, split))
    return Weight(torch.empty(shape, dtype=dtype), spec)


@dataclass(slots=True, frozen=True)
class Split:
    """Says how a parameter is split over the ranks."""

    dim: int  # from the end
    packs: int = 1  # matrices side by side, each of which is split


_WHOLE = ("replicated_with_grad_allreduce", "moe_tp_experts", "embedding_rowwise", "mla_kv_a_proj")
# Styles of parameters of experts [E, N, K].
_SPLITS = {"packed_colwise": Split(-2, 2), "colwise": Split(-2), "rowwise": Split(-1)}


def _split_of(style: str, parameter: nn.Parameter, ranks: int) -> Split:
    if style == "colwise" and parameter.ndim == 1:  # something of each head
        return _dividing(Split(-1), parameter, ranks)
    sums = style == "rowwise" and parameter.ndim == 2  # over ranks, which only layers of ours add up
    if style not in _SPLITS or parameter.ndim < 2 or sums:
        raise UnsupportedError(f"its tensor-parallel plan splits parameters by {style!r}", param="model")
    return _dividing(_SPLITS[style], parameter, ranks)


def _dividing(split: Split, parameter: nn.Parameter, ranks: int) -> Split:
    size = parameter.shape[split.dim]
    if size % (split.packs * ranks):
        raise UnsupportedError(f"{ranks} ranks do not divide {size} rows or columns", param="tensor_parallel_size")
    return split


def _load_split(tp: RankGroup, split: Split, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
    """This rank's share of each of the packed matrices."""
    dim = split.dim % weight.ndim
    expect_shape(tensor, *(size * tp.size if i == dim else size for i, size in enumerate(weight.shape)))
    own = weight.shape[dim] // split.packs
    for pack in range(split.packs):
        tensor.read_into(weight.data.narrow(dim, pack * own, own), dim, (pack * tp.size + tp.rank) * own)


def _load_part(
    tp: RankGroup, split: Split | None, matrices: int, weight: Weight, tensor: CheckpointTensor, shard_id: str
) -> None:
    """One matrix of one expert, or this rank's share of it."""
    expert, matrix = map(int, shard_id.split(".")[-2:])
    rows = weight.shape[1] // matrices
    target = weight.data[expert].narrow(0, matrix * rows, rows)
    dim = 0 if split is None else split.dim % 2
    ranks = 1 if split is None else tp.size
    expect_shape(tensor, *(size * ranks if i == dim else size for i, size in enumerate(target.shape)))
    tensor.read_into(target, dim, 0 if split is None else tp.rank * target.shape[dim])
