"""The contract of models that draft for another one, their target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import ConfigError, UnsupportedError
from app.layers.context import ForwardContext, HiddenStates
from app.layers.vocab import VocabEmbedding
from app.layers.weight import CheckpointTensor, ShapeMismatch, Weight, WeightSpec, expect_shape
from app.models.base import EngineModel
from app.models.decoder import CausalLM


@dataclass(slots=True, frozen=True)
class Target:
    """Holds the model that is drafted for, in the stage that samples."""

    model: EngineModel
    info: ModelInfo

    @property
    def embedding(self) -> VocabEmbedding:
        """Its table of tokens. UnsupportedError where this stage does not hold it."""
        table = self.model.model.embed_tokens if isinstance(self.model, CausalLM) else None
        if table is None:
            raise UnsupportedError(
                "speculative_config: the drafter's checkpoint has no embed_tokens, and the target's are not in the "
                "stage that samples: set pipeline_parallel_size=1",
                param="speculative_config",
            )
        return table

    def expect(self, what: str, drafter: int, target: int) -> None:
        """ConfigError with both numbers where a drafter has another one than its target."""
        if drafter != target:
            raise ConfigError(
                f"speculative_config: the drafter does not fit its target: {what} is {drafter} of the drafter, "
                f"{target} of the target",
                param="speculative_config",
            )


@dataclass(slots=True, frozen=True)
class TokenIds:
    """Says how a checkpoint has the target's id of each token that a drafter knows: as it is, or (`is_offset`) as what
    must be added to the token's own number."""

    count: int
    vocab_size: int  # the target's
    is_offset: bool = False

    def weight(self) -> Weight:
        """The numbers int64 [count] as the checkpoint has them."""
        return Weight(torch.empty(self.count, dtype=torch.int64), WeightSpec(self.load, dummy=0.0))

    def load(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Take them in; ShapeMismatch where one is no token of the target, or two are the same one."""
        expect_shape(tensor, self.count)
        stored = tensor.narrow(0, 0, self.count)
        if stored.dtype.is_floating_point:
            raise ShapeMismatch(f"holds {str(stored.dtype).removeprefix('torch.')}, not token ids")
        ids = stored + torch.arange(self.count) if self.is_offset else stored
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise ShapeMismatch(f"names token {int(outside[0])}, of a vocabulary of {self.vocab_size}")
        if len(set(ids.tolist())) < self.count:
            raise ShapeMismatch("names a token twice")
        weight.data.copy_(stored)


class Drafter(EngineModel):
    """Reads tokens together with features: first those of the target's layers, then its own of the pass before."""

    target: Target
    reads_layers: tuple[int, ...] = ()  # of the target, besides what its last one gives

    @property
    def token_ids(self) -> torch.Tensor | None:
        """int64 [Vd] the target's id of each token that it may draft; None: all of them, in the target's order."""
        return None

    @abstractmethod
    def start(self, hidden: HiddenStates) -> torch.Tensor:
        """The features [T, C] of a step's tokens, from the target's layers."""

    @abstractmethod
    def advance(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T], the token that follows each position, and that position's features [T, C] -> its own [T, C], which
        tell the next token."""

    def keep(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> None:
        """Keep what later passes attend to, as `advance` does, where nobody asks for a draft. To be overridden where
        that takes less than a whole pass."""
        self.advance(token_ids, features, ctx)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Not without features."""
        raise AssertionError("a drafter reads features beside tokens")


def shifted(model: EngineModel, first_index: int) -> None:
    """Have a model's attention layers use the caches from number `first_index` on."""
    for layer in model.attention_layers:
        layer.layer_index += first_index


def without_prefix(name: str, tensor: StoredTensor, unread: Iterable[str] = ()) -> list[tuple[str, StoredTensor]]:
    """A tensor whose name may begin with `model.`; nothing of those that are not read."""
    own = name.removeprefix("model.")
    return [] if own.split(".")[0] in unread else [(own, tensor)]


def ids_by_offset(offsets: torch.Tensor | None) -> torch.Tensor | None:
    """int64 [Vd] the target's ids of tokens of which each says how far its id lies behind its own number."""
    return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)


def expect_layers(named: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs a drafter reads; ConfigError with both numbers where it has not so many. Behind
    the last one lies what that gives."""
    if not all(0 <= layer <= num_layers for layer in named):
        raise ConfigError(
            f"speculative_config: the drafter does not fit its target: it reads the layers {list(named)}, the target "
            f"has {num_layers}",
            param="speculative_config",
        )
    return tuple(named)
