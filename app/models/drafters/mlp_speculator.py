"""The MLP speculator (Wertheimer et al., 2024, arXiv 2404.19124).

A state, at first the target's last hidden state, takes in the token before and tells the next one; a stage for each
draft, or the same for all but the first's projection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.fields.kinds import FLAG, check, whole
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.layers.context import BuildContext, ForwardContext
from app.layers.replicated import ReplicatedLinear
from app.layers.vocab import LMHead, VocabEmbedding
from app.layers.weight import REPLICATED, Weight
from app.models.base import EngineModel
from app.models.drafters.base import Target

EPS = 1e-6
_FIELDS = {
    "n_predict": whole(1, 64),
    **dict.fromkeys(("emb_dim", "inner_dim"), whole(0, 1 << 20)),
    **dict.fromkeys(("tie_weights", "scale_input"), FLAG),
}


def count_stages(info: ModelInfo) -> int:
    """The stages that a checkpoint has."""
    check(info.hf_config, _FIELDS, f"{info.directory}/config.json")
    return int(info.hf_config.get("n_predict", 3))


class ScaledNorm(nn.Module):
    """An RMS norm with weight and bias."""

    def __init__(self, ctx: BuildContext, size: int) -> None:
        super().__init__()
        self.weight, self.bias = (Weight(torch.ones(size, dtype=ctx.dtype), REPLICATED) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        return F.rms_norm(x, x.shape[-1:], self.weight, EPS) + self.bias


class MLPSpeculator(EngineModel):
    """The stages of a checkpoint, as many as drafts are asked for."""

    def __init__(self, ctx: BuildContext, info: ModelInfo, target: Target, *, num_tokens: int) -> None:
        super().__init__()
        hf = info.hf_config
        stages, vocab = count_stages(info), target.info.vocab_size
        width = int(hf.get("emb_dim", target.info.hidden_size))
        inner = int(hf.get("inner_dim") or width)
        target.expect("emb_dim, the hidden size that it reads", width, target.info.hidden_size)
        target.expect("vocab_size", int(hf.get("vocab_size", vocab)), vocab)
        target.expect("num_speculative_tokens, at most its n_predict", min(stages, num_tokens), num_tokens)
        self.is_tied, self.num_stages = bool(hf.get("tie_weights")), num_tokens
        self._scales_input = bool(hf.get("scale_input"))
        own = 1 if self.is_tied else num_tokens
        widths = [width, *[inner] * (min(num_tokens, 2) - 1 if self.is_tied else num_tokens - 1)]
        self.emb = nn.ModuleList(VocabEmbedding(ctx, vocab, inner) for _ in range(own))
        self.proj = nn.ModuleList(ReplicatedLinear(ctx, size, inner, bias=False) for size in widths)
        self.head = nn.ModuleList(LMHead(ctx, vocab, inner) for _ in range(own))
        self.ln = nn.ModuleList(ScaledNorm(ctx, inner) for _ in range(own))
        weight = 0.5 ** (0.5 / stages)  # of the state, against that of the token
        self._token_weight = math.sqrt((1 - weight**2) * inner / 2) / weight

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel; stages that are not asked for are left out, and copies of those that all share."""
        own = name.removeprefix("speculator.")
        found = re.match(r"(emb|proj|head|ln)\.(\d+)\.", own)
        if found is not None and int(found[2]) >= len(getattr(self, found[1])):
            return []
        return [(own, tensor)]

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state [N, C] from the target's hidden states [N, C]."""
        return F.rms_norm(hidden, hidden.shape[-1:], None, EPS) / math.sqrt(2) if self._scales_input else hidden

    def advance(self, state: torch.Tensor, token_ids: torch.Tensor, number: int) -> torch.Tensor:
        """The state [N, C'] after token_ids int [N], the one before draft `number`."""
        stage = 0 if self.is_tied else number
        projection = self.proj[min(number, len(self.proj) - 1)]
        mixed = projection(state) + self.emb[stage](token_ids) * self._token_weight
        return F.gelu(self.ln[stage](mixed))

    def logits(self, state: torch.Tensor, number: int) -> torch.Tensor:
        """[N, C'] -> [N, V] of draft `number`."""
        return self.head[0 if self.is_tied else number](state)  # type: ignore[no-any-return]

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Not without hidden states."""
        raise AssertionError("a speculator reads hidden states")
