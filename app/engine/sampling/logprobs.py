"""Log-probabilities of tokens: computed on the device, turned into TokenLogprobs once they are on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.engine.step import TokenLogprobs


@dataclass(slots=True, frozen=True)
class LogprobTensors:
    """For n positions: the chosen token first, then the k likeliest."""

    token_ids: torch.Tensor  # int64 [n, 1 + k]
    logprobs: torch.Tensor  # fp32 [n, 1 + k]
    ranks: torch.Tensor  # int64 [n], of the chosen token, 1 = likeliest

    def tolist(self, counts: list[int]) -> list[TokenLogprobs]:
        """One entry for each position with its `counts[i]` likeliest tokens (tensors must be on the host)."""
        rows = zip(counts, self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        return [TokenLogprobs(ids[: k + 1], values[: k + 1], [rank, *range(1, k + 1)]) for k, ids, values, rank in rows]


@dataclass(slots=True, frozen=True)
class RawLogprobs:
    """Log-softmax of the model's own logits, kept until the tokens are chosen."""

    values: torch.Tensor  # fp32 [n, V]
    top_values: torch.Tensor  # fp32 [n, k]
    top_ids: torch.Tensor  # int64 [n, k]

    @classmethod
    def of(cls, logits: torch.Tensor, k: int) -> RawLogprobs:
        """fp32 logits [n, V], which may be overwritten afterwards."""
        values = torch.log_softmax(logits, dim=-1)
        top_values, top_ids = values.topk(k, dim=-1)
        return cls(values, top_values, top_ids)

    def of_chosen(self, token_ids: torch.Tensor) -> LogprobTensors:
        """With the chosen tokens int64 [n]."""
        ids = token_ids.unsqueeze(1)
        chosen = self.values.gather(1, ids)
        ranks = (self.values > chosen).sum(dim=1) + 1
        return LogprobTensors(torch.cat((ids, self.top_ids), dim=1), torch.cat((chosen, self.top_values), dim=1), ranks)


def num_logprobs(asked: int | None, vocab_size: int) -> int | None:
    """How many likeliest tokens a request gets: None for no logprobs at all; -1 asks for all."""
    if asked is None:
        return None
    return vocab_size if asked < 0 else min(asked, vocab_size)
