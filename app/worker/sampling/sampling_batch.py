"""Sampling parameters of all rows, and of the rows that sample: rebuilt only when those change (I3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.platforms.to_device import to_device
from app.records.step import NewRequest
from app.worker.rows.logprobs import num_logprobs
from app.worker.rows.step_inputs import StepInputs

GREEDY_BELOW = 1e-5  # a smaller temperature would overflow fp32; it is greedy in all but name
NO_LOGPROBS = -1
MIN_TOP_P = float(np.finfo(np.float32).tiny)  # a smaller one would be 0 in fp32; both keep the most likely token alone


@dataclass(slots=True, frozen=True)
class RandomRows:
    """Parameters of the rows that sample at random, as tensors on the device."""

    indices: torch.Tensor | None  # int64 [n] among the logits rows; None when it is all of them
    temperature: torch.Tensor  # fp32 [n, 1]
    top_p: torch.Tensor | None  # fp32 [n]; None: no row uses it
    top_k: torch.Tensor | None  # int32 [n], 0 keeps all; None: no row uses it
    max_top_k: int | None  # the largest top_k, where every row has one
    min_p: torch.Tensor | None  # fp32 [n]; None: no row uses it
    keys: torch.Tensor  # int64 [n, 2]: seed, choice index


@dataclass(slots=True, frozen=True)
class SamplingBatch:
    """The N rows that sample, in the order of their logits."""

    rows: NDArray[np.int64]
    device_rows: torch.Tensor  # int64 [N]
    random: RandomRows | None  # None: all are greedy
    logprob_indices: list[int]  # logits rows that want logprobs
    device_logprob_indices: torch.Tensor | None  # int64; None when it is all rows, or none
    logprob_counts: list[int]  # how many, for each of them
    logprob_token_ids: torch.Tensor | None  # int64 [n, most of these], -1 where none is named; None: no row names any


class SamplingRows:
    """Every row's sampling parameters, on the host: a few numbers, sent on when the batch changes.

    What a draw needs of them are lines of the step's inputs, in which every parameter has a value that turns it off."""

    def __init__(self, inputs: StepInputs, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        declare = partial(inputs.declare, for_layers=False)
        self._keys = declare("keys", torch.int64, (2,))  # seed, choice index
        self._top_k = declare("top_k", torch.int32)  # 0: off
        self._temperature = declare("temperature", torch.float32)  # 0: greedy
        self._top_p = declare("top_p", torch.float32, idle=1)  # 1: off
        self._min_p = declare("min_p", torch.float32)  # 0: off
        self._logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self._logprob_token_ids: dict[int, tuple[int, ...]] = {}  # by row, for those that name some
        self._vocab_size = vocab_size
        self._device = device

    def add(self, request: NewRequest) -> None:
        """A request entered its row."""
        params, row = request.spec.sampling, request.row
        assert params.seed is not None, "the API layer draws the seed"
        greedy = params.temperature < GREEDY_BELOW
        self._temperature.values[row] = 0.0 if greedy else params.temperature
        self._top_p.values[row] = max(params.top_p, MIN_TOP_P)
        self._min_p.values[row] = params.min_p
        self._top_k.values[row] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._keys.set(row, (params.seed, request.spec.choice_index))  # tells the table of all five
        self._logprob_token_ids.pop(row, None)
        count = None if params.logprobs is None else num_logprobs(params.logprobs, self._vocab_size)
        if params.logprob_token_ids is not None:
            self._logprob_token_ids[row] = params.logprob_token_ids
            count = len(params.logprob_token_ids)
        self._logprobs[row] = NO_LOGPROBS if count is None else count

    def want_logprobs(self, rows: NDArray[np.int64]) -> bool:
        """True if one of these rows wants logprobs."""
        return bool((self._logprobs[rows] != NO_LOGPROBS).any())

    def batch(self, rows: NDArray[np.int64]) -> SamplingBatch:
        """The parameters of these rows, on the device."""
        counts = self._logprobs[rows]
        asking = np.flatnonzero(counts != NO_LOGPROBS)
        some = 0 < len(asking) < len(rows)
        return SamplingBatch(
            rows=rows,
            device_rows=self._to_device(rows),
            random=self._random_rows(rows),
            logprob_indices=asking.tolist(),
            device_logprob_indices=self._to_device(asking) if some else None,
            logprob_counts=counts[asking].tolist(),
            logprob_token_ids=self._named_tokens(rows[asking], counts[asking]),
        )

    def _named_tokens(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> torch.Tensor | None:
        """`SamplingBatch.logprob_token_ids` of the rows that want logprobs."""
        if self._logprob_token_ids.keys().isdisjoint(rows.tolist()):
            return None
        named = np.full((len(rows), counts.max()), -1, dtype=np.int64)
        for i, row in enumerate(rows.tolist()):
            token_ids = self._logprob_token_ids.get(row, ())
            named[i, : len(token_ids)] = token_ids
        return self._to_device(named)

    def _random_rows(self, rows: NDArray[np.int64]) -> RandomRows | None:
        indices = np.flatnonzero(self._temperature.values[rows] > 0.0)
        if len(indices) == 0:
            return None
        drawn = rows[indices]
        temperature, top_p, min_p, top_k, keys = (
            entry.values[drawn] for entry in (self._temperature, self._top_p, self._min_p, self._top_k, self._keys)
        )
        return RandomRows(
            indices=self._to_device(indices) if len(indices) < len(rows) else None,
            temperature=self._to_device(temperature).unsqueeze(1),
            top_p=self._to_device(top_p) if (top_p < 1.0).any() else None,
            top_k=self._to_device(top_k) if (top_k > 0).any() else None,
            max_top_k=int(top_k.max()) if (top_k > 0).all() else None,
            min_p=self._to_device(min_p) if (min_p > 0.0).any() else None,
            keys=self._to_device(keys),
        )

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        return to_device(array, self._device)
