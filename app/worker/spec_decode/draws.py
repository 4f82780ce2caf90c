"""Draws draft tokens as the sampler draws tokens: with each request's temperature, filters and random numbers.

A draft drawn with the very numbers that its place will be sampled with is right more often than the most likely token
where tokens are drawn at random (the coupling of Daliri et al., 2024). So numbers go by the ids of the target's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from app.kernels.sampling import SAMPLE_TOKENS
from app.worker.rows.step_inputs import StepInputs, send
from app.worker.spec_decode.base import Proposal

NAMES = ("temperature", "top_k", "top_p", "min_p", "keys")  # lines of the table, which the sampler declares
Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits [N, Vd], positions int64 [N]) -> int64 [N]


class DraftSampler:
    """That of one drafter, on one rank."""

    def __init__(
        self, inputs: StepInputs, device: torch.device, vocab_size: int, token_ids: torch.Tensor | None = None
    ) -> None:
        """`token_ids` int64 [Vd]: the target's id of each token that is drafted; None: they are the same."""
        self._inputs = inputs
        self._device = device
        self._vocab_size = vocab_size
        self._token_ids = token_ids
        self._sample_tokens = SAMPLE_TOKENS.on(device)

    def of(self, proposal: Proposal) -> Draw:
        """Draws for the proposal's rows."""
        params = self._parameters(proposal)
        return self._most_likely if params is None else lambda logits, positions: self._drawn(logits, params, positions)

    def _parameters(self, proposal: Proposal) -> Mapping[str, torch.Tensor] | None:
        """Returns what the N rows ask for; None: only the most likely tokens, as the host knows."""
        view, count = proposal.view, len(proposal.rows)
        if view.host is None:
            return {name: view.rows[name][:count] for name in NAMES}
        lines = [self._inputs.lines[name] for name in NAMES]
        values = [line.values[view.host.rows] for line in lines]
        if not (values[0] > 0).any():
            return None
        sent = send([line.line for line in lines], values, self._device)
        at = view.row_of_token[proposal.ends]
        return {name: sent[name][at] for name in NAMES}

    def _most_likely(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        best = logits[:, : self._vocab_size].argmax(dim=-1)
        return best if self._token_ids is None else self._token_ids[best]

    def _drawn(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        temperature, top_k, top_p, min_p, keys = (params[name] for name in NAMES)
        spread = self._spread(logits)
        drawn = self._sample_tokens(spread, temperature, top_k, top_p, min_p, keys, positions)[0]
        return drawn.clamp(0, self._vocab_size - 1)  # before its kernels run (compile ahead) they may be anything

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, Vd] -> [N, V] by the target's ids."""
        if self._token_ids is None:
            return logits[:, : self._vocab_size].contiguous()
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._token_ids, logits)
