"""Medusa (Cai et al., 2024): heads over the target's last hidden state, each for a token further ahead than the last.

Checkpoints as the authors publish them (`0.0.linear.weight`, `0.1.weight`), or under vLLM's names (`blocks`,
`lm_heads`, and a `token_map` where the heads know fewer tokens).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.fields.kinds import check, whole
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import CheckpointError
from app.layers.context import BuildContext, ForwardContext
from app.layers.replicated import ReplicatedLinear
from app.layers.vocab import LMHead
from app.models.base import EngineModel
from app.models.drafters.base import Target, TokenIds

_FIELDS = {
    **dict.fromkeys(("num_heads", "medusa_num_heads", "medusa_num_layers"), whole(0, 1 << 10)),
    "truncated_vocab_size": whole(1, 1 << 30),
}
MOST_LAYERS = 64  # of a head
MOST_HEADS = 64


class MedusaBlock(nn.Module):
    """x + silu(W x), as often as there are layers."""

    def __init__(self, ctx: BuildContext, hidden_size: int, num_layers: int, has_bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ReplicatedLinear(ctx, hidden_size, hidden_size, has_bias) for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaDrafter(EngineModel):
    """The heads of a checkpoint, whose tensors have these names."""

    def __init__(
        self, ctx: BuildContext, info: ModelInfo, target: Target, *, names: Collection[str], num_tokens: int
    ) -> None:
        """`num_tokens`: the drafts of a row, for which there must be heads."""
        super().__init__()
        hf = info.hf_config
        heads = count_heads(info, names)
        size, vocab = target.info.hidden_size, target.info.vocab_size
        target.expect("hidden_size", int(hf.get("hidden_size", size)), size)
        target.expect("vocab_size", int(hf.get("vocab_size", vocab)), vocab)
        own = [name for name in map(own_name, names) if name is not None]
        target.expect("num_speculative_tokens, at most its number of heads", min(heads, num_tokens), num_tokens)
        layers = _count(own, r"blocks\.\d+\.layers\.(\d+)\.") or int(
            hf.get("num_hidden_layers") or hf.get("medusa_num_layers") or 1
        )
        if layers > MOST_LAYERS or heads > MOST_HEADS:
            raise CheckpointError(f"{info.directory}: {heads} heads of {layers} layers are none of Medusa's")
        has_bias = any(name.startswith("blocks.") and name.endswith(".bias") for name in own)
        self.num_tokens = int(hf.get("truncated_vocab_size") or vocab) if "token_map" in own else vocab
        self.is_one_head = bool(hf.get("original_lm_head"))
        self.num_heads = num_tokens
        self.blocks = nn.ModuleList(MedusaBlock(ctx, size, layers, has_bias) for _ in range(num_tokens))
        count = 1 if self.is_one_head else num_tokens
        self.lm_heads = nn.ModuleList(LMHead(ctx, self.num_tokens, size) for _ in range(count))
        self.token_map = TokenIds(self.num_tokens, vocab).weight() if self.num_tokens < vocab else None

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel; heads that are not asked for are left out."""
        own = own_name(name)
        found = None if own is None else re.match(r"(blocks|lm_heads)\.(\d+)\.", own)
        most = 1 if found is not None and found[1] == "lm_heads" and self.is_one_head else self.num_heads
        if own is None or (found is not None and int(found[2]) >= most) or (own == "token_map" and not self.has_map):
            return []
        return [(own, tensor)]

    @property
    def has_map(self) -> bool:
        """True if the heads know fewer tokens than the target."""
        return self.token_map is not None

    def logits(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        """The target's hidden states [N, C] of tokens -> [N, Vd] for the token `number` + 2 places behind."""
        head = self.lm_heads[0 if self.is_one_head else number]
        return head(self.blocks[number](hidden))  # type: ignore[no-any-return]

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Not without hidden states."""
        raise AssertionError("heads read hidden states")


def count_heads(info: ModelInfo, names: Iterable[str]) -> int:
    """The heads that a checkpoint has, whose tensors have these names."""
    hf = info.hf_config
    check(hf, _FIELDS, f"{info.directory}/config.json")
    own = [name for name in map(own_name, names) if name is not None]
    return _count(own, r"lm_heads\.(\d+)\.") or int(hf.get("num_heads") or hf.get("medusa_num_heads") or 0)


def own_name(name: str) -> str | None:
    """Our name of a tensor: vLLM's; None for one that has no use."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if (layer := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)) is not None:
        return f"blocks.{layer[1]}.layers.{layer[2]}.{layer[3]}"
    if (head := re.fullmatch(r"(\d+)\.(\d+)\.weight", name)) is not None:
        return f"lm_heads.{head[1]}.weight"
    if name == "lm_head.weight":
        return "lm_heads.0.weight"
    return name if name == "token_map" or name.startswith(("blocks.", "lm_heads.")) else None


def _count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number in the names."""
    return max((int(found[1]) + 1 for name in names if (found := re.match(pattern, name)) is not None), default=0)
