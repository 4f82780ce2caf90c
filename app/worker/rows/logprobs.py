"""Log-probabilities of tokens: computed on the device, turned into TokenLogprobs once they are on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.records.step import TokenLogprobs


@dataclass(slots=True, frozen=True)
class LogprobTensors:
    """Logprobs at n positions: the chosen token first, then k others: the most likely, or those that were named."""

    token_ids: torch.Tensor  # int64 [n, 1 + k]
    logprobs: torch.Tensor  # fp32 [n, 1 + k]
    ranks: torch.Tensor  # int64 [n, 1], of the chosen token, 1 = most likely; [n, 1 + k] where a position names tokens

    def tolist(self, counts: list[int]) -> list[TokenLogprobs]:
        """One entry for each position with the first `counts[i]` reported tokens (tensors must be on the host)."""
        rows = zip(counts, self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        return [
            TokenLogprobs(ids[: k + 1], values[: k + 1], [*ranks[: k + 1], *range(len(ranks), k + 1)])
            for k, ids, values, ranks in rows
        ]


@dataclass(slots=True, frozen=True)
class RawLogprobs:
    """Log-softmax of the model's own logits, kept until the tokens are chosen."""

    values: torch.Tensor  # fp32 [n, V]
    reported: torch.Tensor  # fp32 [n, k]
    reported_ids: torch.Tensor  # int64 [n, k]
    reported_ranks: torch.Tensor  # int64 [n, k]; [n, 0]: 1 to k

    @classmethod
    def of(cls, values: torch.Tensor, k: int, named: torch.Tensor | None = None) -> RawLogprobs:
        """Logprobs fp32 [n, V] of all tokens. `named` int64 [n, k] holds token ids to report instead of the most likely
        ones; -1 leaves those."""
        top, ids = values.topk(k, dim=-1)
        if named is None:
            return cls(values, top, ids, ids[:, :0])
        ids = torch.where(named >= 0, named, ids)
        reported = values.gather(1, ids)
        # One sort finds the rank of every token that is named: V minus how many are at most as likely, plus 1.
        ranks = values.shape[1] + 1 - torch.searchsorted(values.sort(dim=-1).values, reported, right=True)
        top = torch.arange(1, k + 1, device=ids.device)
        return cls(values, reported, ids, torch.where(named >= 0, ranks, top))

    def of_chosen(self, token_ids: torch.Tensor) -> LogprobTensors:
        """The logprobs and ranks of the chosen tokens int64 [n]."""
        ids = token_ids.unsqueeze(1)
        chosen = self.values.gather(1, ids)
        rank = (self.values > chosen).sum(dim=1, keepdim=True) + 1
        return LogprobTensors(
            torch.cat((ids, self.reported_ids), dim=1),
            torch.cat((chosen, self.reported), dim=1),
            torch.cat((rank, self.reported_ranks), dim=1),
        )


def num_logprobs(asked: int | None, vocab_size: int) -> int | None:
    """Returns how many most likely tokens a request gets: None for no logprobs at all; -1 asks for all."""
    if asked is None:
        return None
    return vocab_size if asked < 0 else min(asked, vocab_size)
