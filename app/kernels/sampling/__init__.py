"""Sampling kernels: counter-based random numbers (I6), Gumbel-argmax, and the top-k / top-p / min-p filters.

A token is sampled as the argmax of logits + Gumbel noise (the Gumbel-max trick: Gumbel, 1954; Maddison, Tarlow and
Minka, 2014). Filters: top-k (Fan, Lewis and Dauphin, 2018), top-p or nucleus (Holtzman et al., 2020), min-p (Nguyen et
al., 2024).

Invariant I6 rests here: a random number is a pure function of its key (seed, choice index, purpose) and its counter
(absolute position, token id), so it is the same alone or in a batch, on any device, after preemption or migration.
`philox.py` holds the generator, `reference.py` the plain PyTorch truth and CPU path of the rest, `triton_ops.py` the
one-pass draw for GPUs, `triton_sample.py` the whole way from logits to tokens there, without a sort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from app.kernels.kernel_table import HOST, TRITON, Candidate, KernelTable
from app.kernels.sampling.philox import uniform
from app.kernels.sampling.reference import apply_min_p, apply_top_k_top_p

__all__ = [
    "GUMBEL_ARGMAX",
    "LOG_SOFTMAX",
    "SAMPLE_TOKENS",
    "TOKEN_MASKS",
    "apply_min_p",
    "apply_top_k_top_p",
    "uniform",
]


class GumbelArgmax(Protocol):
    """The draw alone."""

    def __call__(
        self, logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, purpose: int = 0
    ) -> torch.Tensor:
        """Draw one token a row from softmax(logits): fp32 [N, V] -> int64 [N].

        keys int64 [N, 2] holds (seed, choice index), positions int64 [N] the absolute position of the sampled token;
        different purposes at the same position draw independent numbers. A token of logit -inf is never sampled, as
        long as its row has a finite one.
        """


class SampleTokens(Protocol):
    """The whole way from logits to tokens."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        *,
        purpose: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token a row and its logprob, whatever each row asks for: (token ids int64 [N], logprobs fp32 [N]).

        A pure function of its tensors. On a GPU it neither waits for the host nor looks at a value there, and its
        launches depend on the shapes alone: one CUDA graph serves every mix of rows, and a change of parameters is a
        copy into the static tensors. Every parameter has a value that turns it off.

        logits [N, V] of any floating type, rows contiguous, left as they are. fp32 [N]: temperature (0 or below:
        greedy, the lowest id among equals), top_p (1: off), min_p (0: off). int32 or int64 [N]: top_k (below 1 or at
        least V: off). keys int64 [N, 2] holds (seed, choice index), positions int64 [N] the absolute position of the
        sampled token. Filters as in `apply_min_p` and `apply_top_k_top_p`, in this order: logits / temperature, min_p,
        top_k, then top_p of what these leave; ties with the last token kept are kept. The draw is that of
        GumbelArgmax. The logprob is that of the logits as given: temperature 1, no filter. A row without a finite
        logit gets some valid id.
        """


class TokenMasks(Protocol):
    """The way to forbid tokens: grammars and lists of allowed ones do."""

    def __call__(self, logits: torch.Tensor, indices: torch.Tensor, words: torch.Tensor) -> None:
        """-inf into row indices[g] of fp32 logits [N, V], in place, at every token whose bit in words[g] is 0.

        indices int32 [G], each row at most once; words int32 [G, W]: bit t % 32 of word t // 32 is token t. Tokens past
        the last word are forbidden; bits past V have no meaning.
        """


GUMBEL_ARGMAX: KernelTable[GumbelArgmax] = KernelTable(
    "gumbel_argmax",
    Candidate("app.kernels.sampling.exact:gumbel_argmax", HOST, is_exact=True),
    Candidate("app.kernels.sampling.triton_ops:gumbel_argmax", TRITON, is_exact=True),
    Candidate("app.kernels.sampling.triton_ops:gumbel_argmax", TRITON),
    Candidate("app.kernels.sampling.reference:gumbel_argmax"),
)

SAMPLE_TOKENS: KernelTable[SampleTokens] = KernelTable(
    "sample_tokens",
    Candidate("app.kernels.sampling.exact:sample_tokens", HOST, is_exact=True),
    Candidate("app.kernels.sampling.triton_sample:sample_tokens", TRITON, is_exact=True),
    Candidate("app.kernels.sampling.triton_sample:sample_tokens", TRITON),
    Candidate("app.kernels.sampling.reference:sample_tokens"),
)

TOKEN_MASKS: KernelTable[TokenMasks] = KernelTable(
    "apply_token_masks",
    Candidate("app.kernels.sampling.triton_token_masks:apply_token_masks", TRITON),
    Candidate("app.kernels.sampling.token_masks:apply_token_masks"),
)

# fp32 logits [N, V] -> the logarithms of their softmax, [N, V].
LOG_SOFTMAX: KernelTable[Callable[[torch.Tensor], torch.Tensor]] = KernelTable(
    "log_softmax",
    Candidate("app.kernels.sampling.exact:log_softmax", HOST, is_exact=True),
    Candidate("app.kernels.sampling.triton_log_softmax:log_softmax", TRITON, is_exact=True),
    Candidate("app.kernels.sampling.reference:log_softmax"),
)
