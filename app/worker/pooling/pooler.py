"""Stands where a generating model has its sampler: turns a step's hidden states into the results of the prompts it
ends.

A prompt may be computed over several steps (I1), so rows that go on keep what was pooled of them so far, on the
device. A request that enters its row again after a preemption begins anew: with `PoolingInfo.needs_all_tokens`, the
scheduler lets it find nothing in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from app.platforms.to_device import to_device
from app.records.pooling_info import PoolingInfo
from app.records.pooling_params import PoolingParams
from app.records.step import NewRequest
from app.worker.pooling import POOLINGS
from app.worker.pooling.heads import ClassifierHead, EmbeddingHead
from app.worker.pooling.token_heads import TokenHeads
from app.worker.rows.pending_step import PooledRows
from app.worker.rows.worker_feature import WorkerFeature

Int64Array = NDArray[np.int64]


class Pooler(WorkerFeature):
    """Knows the pooling parameters of every row. `classify` maps pooled vectors [N, C] to logits [N, classes]."""

    def __init__(
        self,
        info: PoolingInfo,
        device: torch.device,
        classify: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        dummy: bool = False,
        within: Callable[[Sequence[int]], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`within`: see ForwardPass.within_classes."""
        self._device, self._within = device, within
        self._pooling = POOLINGS.load(info.pooling)()
        self._embed = EmbeddingHead(info, device, dummy)
        self._classify = None if classify is None else ClassifierHead(info, classify)
        heads = info.token_heads
        self._of_tokens = None if heads is None else TokenHeads(heads, device, dummy)
        self._marks = None if info.listwise is None else info.listwise.marks
        self._places: dict[int, Int64Array] = {}  # row -> of its tokens that have vectors, where not all do
        self._params: dict[int, PoolingParams] = {}
        self._asked: dict[int, PoolingParams] = {}  # row -> what the heads read of them
        self._vectors: dict[int, torch.Tensor] = {}  # row -> [C] of the chunks so far
        self._tokens: dict[int, list[torch.Tensor]] = {}  # row -> results of the tokens so far

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        params = request.spec.pooling
        assert params is not None, "a request without pooling parameters at a pooling model"
        self.leave(row)
        self._params[row] = params
        if self._marks is not None:
            self._places[row] = np.flatnonzero(np.isin(request.token_ids, self._marks)).astype(np.int64)
        # Where a second text begins is the embeddings' business, and the pooling's what it leaves out.
        own = {"second_text_at": None, "num_skipped": None}
        self._asked[row] = params.model_copy(update=own) if params.second_text_at or params.num_skipped else params

    def leave(self, row: int) -> None:
        """The row was freed."""
        self._params.pop(row, None)
        self._places.pop(row, None)
        self._asked.pop(row, None)
        self._vectors.pop(row, None)
        self._tokens.pop(row, None)

    def compute(
        self, rows: list[int], ends: NDArray[np.bool_], starts: Int64Array, lengths: Int64Array, hidden: torch.Tensor
    ) -> PooledRows:
        """Results of the rows whose prompts end in this step.

        `ends[i]` says so of rows[i], whose tokens are hidden[starts[i] : starts[i + 1]] of [T, C] and `lengths[i]` of
        its prompt by the end of the step.
        """
        places = np.cumsum(ends) - 1  # of each row among those that end
        pooled = PooledRows(int(ends.sum()))
        of_tokens = [i for i, row in enumerate(rows) if self._params[row].is_of_tokens]
        if len(of_tokens) < len(rows):
            whole = sorted(set(range(len(rows))).difference(of_tokens)) if of_tokens else [*range(len(rows))]
            pooled.parts.extend(self._pool(rows, ends, places, whole, starts, lengths, hidden))
        for i in of_tokens:
            row = rows[i]
            head = self._head(self._params[row])
            own = self._counted(row, hidden[starts[i] : starts[i + 1]], int(lengths[i])).float()
            with self._within([row] * len(own)):
                part = head(own, self._params[row])
            self._tokens.setdefault(row, []).append(part)
            if ends[i]:
                pooled.parts.append(([int(places[i])], torch.cat(self._tokens.pop(row)).unsqueeze(0)))
        return pooled

    def _counted(self, row: int, hidden: torch.Tensor, end: int) -> torch.Tensor:
        """Hidden states of those of a row's tokens that have vectors; the last one is token `end - 1` of its prompt."""
        if (places := self._places.get(row)) is None:
            return hidden
        within = places - (end - len(hidden))
        own = within[(within >= 0) & (within < len(hidden))]
        return hidden[to_device(own, self._device)]

    def _pool(
        self,
        rows: list[int],
        ends: NDArray[np.bool_],
        places: Int64Array,
        whole: list[int],
        starts: Int64Array,
        lengths: Int64Array,
        hidden: torch.Tensor,
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """One vector each, of the rows `whole`: those of the same parameters go through the head together."""
        firsts = lengths - np.diff(starts)
        skipped = np.array([self._params[row].num_skipped or 0 for row in rows], np.int64)
        if skipped.any():
            hidden = hidden.index_fill(0, to_device(_skipped(starts, firsts, skipped), self._device), 0)
            lengths = np.maximum(lengths - skipped, 1)
        vectors = self._pooling.of_step(hidden, to_device(starts, self._device), to_device(firsts, self._device))
        groups: dict[PoolingParams, list[int]] = {}
        for i in whole:
            row = rows[i]
            if (earlier := self._vectors.pop(row, None)) is not None:
                vectors[i] = self._pooling.merge(earlier, vectors[i])
            if not ends[i]:
                self._vectors[row] = vectors[i].clone()  # not a view, which would keep the whole step's
                continue
            groups.setdefault(self._asked[row], []).append(i)
        for params, members in groups.items():
            own = vectors if len(members) == len(rows) else vectors[to_device(np.array(members), self._device)]
            counts = to_device(lengths[members].astype(np.float32), self._device)
            with self._within([rows[i] for i in members]):
                yield places[members].tolist(), self._head(params)(self._pooling.finish(own, counts), params)

    def _head(self, params: PoolingParams) -> Callable[[torch.Tensor, PoolingParams], torch.Tensor]:
        if self._of_tokens is not None and params.is_of_tokens:
            return self._of_tokens
        if params.task not in ("classify", "token_classify"):
            return self._embed
        assert self._classify is not None, "the API layer lets no classification through to a model without classes"
        return self._classify


def _skipped(starts: Int64Array, firsts: Int64Array, skipped: Int64Array) -> Int64Array:
    """The rows of hidden states of the first tokens of each prompt, of which this step has those from `firsts` on."""
    ends = np.minimum(starts[:-1] + np.maximum(skipped - firsts, 0), starts[1:])
    return np.concatenate([np.arange(start, end) for start, end in zip(starts[:-1], ends, strict=True)])
