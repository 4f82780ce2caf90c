"""Takes apart matrices that hold queries, keys and values of all heads, group by group."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import rows_of
from app.errors import CheckpointError
from app.models.decoder_settings import DecoderSettings


def taken_apart(
    settings: DecoderSettings, name: str, tensor: StoredTensor, joined: str
) -> Iterable[tuple[str, StoredTensor]]:
    """The projections in a matrix, or bias, below a module that is called `joined` (`.attention.query_key_value.`): the
    queries of each key's group, its key, its value. Any other tensor as it is."""
    head, found, leaf = name.rpartition(joined)
    if not found:
        yield name, tensor
        return
    queries = settings.num_heads // settings.num_kv_heads
    for part, first, count in (("q_proj", 0, queries), ("k_proj", queries, 1), ("v_proj", queries + 1, 1)):
        take = partial(part_of_heads, head_dim=settings.head_dim, group=queries + 2, first=first, count=count)
        yield f"{head}.self_attn.{part}.{leaf}", rows_of(tensor, take)


def part_of_heads(x: torch.Tensor, head_dim: int, group: int, first: int, count: int) -> torch.Tensor:
    """The rows of one projection: heads `first` to `first + count` of each group of `group` heads [.., D].
    CheckpointError where they are no such groups."""
    if len(x) % (group * head_dim):
        what = f"{len(x)} rows of queries, keys and values are no groups of {group} heads of {head_dim}"
        raise CheckpointError(what, param="model")
    heads = x.reshape(-1, group, head_dim, *x.shape[1:])
    return heads[:, first : first + count].reshape(-1, *x.shape[1:])
