"""Plain PyTorch sampling: Gumbel-argmax and the filters. Rows never influence one another (I6).

Every filter works on the caller's fp32 logits [N, V] in place, drops a token by setting it to -inf, keeps tokens that
tie with the last one kept, and always keeps the most likely.
"""

from __future__ import annotations

import torch

from app.kernels.sampling.philox import uniform, uniform_at

# Where fewer than one token in so many can win a draw, random numbers are made for these alone.
_SPARSE_FACTOR = 8
# -log(-log1p(-u)) lies between -2.82 (u = 1 - 2^-24) and 22.88 (u = 2^-33); with a margin for rounding.
_GUMBEL_SPREAD = 25.8
# Most likely tokens looked at before a nucleus is sought in the whole vocabulary.
_NUCLEUS_TRY = 64


def gumbel_argmax(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, purpose: int = 0
) -> torch.Tensor:
    """The contract of `app.kernels.sampling.gumbel_argmax`, on any device."""
    if logits.device.type == "cpu":
        return _gumbel_argmax_sparse(logits, keys, positions, purpose)
    return _perturb(logits, uniform(keys, positions, logits.shape[1], purpose)).argmax(dim=-1)


def _perturb(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    # -log1p(-u) is an exponential variable whose small values, which decide, are the fine end of `u`.
    return logits - torch.log(-torch.log1p(-u))


def _gumbel_argmax_sparse(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, purpose: int
) -> torch.Tensor:
    """The same; a token further below its row's maximum than noise can lift it needs no random number."""
    can_win = logits >= logits.amax(dim=-1, keepdim=True) - _GUMBEL_SPREAD
    if int(can_win.sum()) * _SPARSE_FACTOR > logits.numel():
        return _perturb(logits, uniform(keys, positions, logits.shape[1], purpose)).argmax(dim=-1)
    rows, token_ids = can_win.nonzero(as_tuple=True)
    u = uniform_at(keys[rows], positions[rows], token_ids, purpose)
    scores = torch.full_like(logits, float("-inf"))
    scores[rows, token_ids] = _perturb(logits[rows, token_ids], u)
    return scores.argmax(dim=-1)


def apply_top_k_top_p(
    logits: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    *,
    max_top_k: int | None = None,
) -> torch.Tensor:
    """Keep each row's top_k[i] most likely tokens, then of these the fewest whose probability reaches top_p[i].

    logits fp32 [N, V], changed in place and returned; top_k int32 [N], below 1 keeps all; top_p fp32 [N] in (0, 1].
    None means that no row of the step sets it and costs nothing. `max_top_k` is the largest top_k of the step, V if a
    row has none; with it nothing is sorted beyond that many tokens, without it the whole vocabulary is.
    """
    num_left = logits.shape[1] if top_k is None else min(max_top_k or logits.shape[1], logits.shape[1])
    if top_k is not None:
        _apply_top_k(logits, top_k[:, None].long(), num_left)
    if top_p is not None:
        _apply_top_p(logits, top_p[:, None], num_left)
    return logits


def _apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> None:
    vocab_size = logits.shape[1]
    keeps_all = (top_k < 1) | (top_k >= vocab_size)
    if logits.device.type == "cpu" and max_top_k == vocab_size:
        max_top_k = max(1, int(top_k.masked_fill(keeps_all, 0).max()))
    largest = logits.topk(max_top_k, dim=-1).values
    least_kept = largest.gather(1, top_k.clamp(min=1, max=max_top_k) - 1)
    logits.masked_fill_(logits < least_kept.masked_fill_(keeps_all, float("-inf")), float("-inf"))


def _apply_top_p(logits: torch.Tensor, top_p: torch.Tensor, num_sorted: int) -> None:
    """`num_sorted`: no row has more tokens left (ties aside)."""
    probs = torch.softmax(logits, dim=-1)
    if logits.device.type == "cpu" and num_sorted > _NUCLEUS_TRY:
        # Most nuclei are small; on a CPU it costs little to look.
        top = probs.topk(_NUCLEUS_TRY, dim=-1).values
        if bool(((top.cumsum(dim=-1)[:, -1:] - top[:, -1:] >= top_p) | (top_p >= 1.0)).all()):
            num_sorted = _NUCLEUS_TRY
    largest = probs.topk(num_sorted, dim=-1).values
    mass_before = largest.cumsum(dim=-1) - largest
    num_kept = (mass_before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)  # 0: a row without a finite logit
    least_kept = largest.gather(1, num_kept - 1).masked_fill_(top_p >= 1.0, 0.0)
    logits.masked_fill_(probs < least_kept, float("-inf"))


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor | None) -> torch.Tensor:
    """Drop tokens less likely than min_p[i] times their row's most likely: fp32 [N, V], in place; min_p fp32 [N].

    None means that no row of the step sets it and costs nothing; 0 keeps all.
    """
    if min_p is None:
        return logits
    threshold = logits.amax(dim=-1, keepdim=True) + torch.log(min_p)[:, None]
    return logits.masked_fill_(logits < threshold, float("-inf"))


def sample_tokens(
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
    """The contract of `app.kernels.sampling.sample_tokens`, on any device."""
    logits = logits.float()
    token_ids = logits.argmax(dim=-1)
    rows = (temperature > 0.0).nonzero().squeeze(1)
    if len(rows) > 0:
        scaled = logits[rows] / temperature[rows, None]
        apply_min_p(scaled, min_p[rows])
        limited = bool((top_k[rows] > 0).any())
        nucleus = bool((top_p[rows] < 1.0).any())
        apply_top_k_top_p(scaled, top_k[rows] if limited else None, top_p[rows] if nucleus else None)
        token_ids[rows] = gumbel_argmax(scaled, keys[rows], positions[rows], purpose=purpose)
    chosen = logits.gather(1, token_ids[:, None]).squeeze(1)
    return token_ids, chosen - logits.logsumexp(dim=-1)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Logprobs of fp32 logits [N, V]."""
    return torch.log_softmax(logits, dim=-1)
