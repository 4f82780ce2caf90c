"""Texts that are told in advance, and a drafter that knows them and lies at imposed places: `benchmarks.speculation`.

While `told` holds, every token that a step draws is replaced by one that its position decides, behind the draw: so
acceptance holds whatever the sums of a step with more tokens round to. The drafter also runs the one that stands
`beside` it (`eagle3` of the checkpoint `model`, or `mtp`), whose drafts it drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self
from unittest import mock

import torch

from app.backends import PROPOSERS
from app.layers.attention_layer import AttentionLayer
from app.worker.graphs import static_step
from app.worker.logits_processors.base import SamplingStep
from app.worker.sampling.sampler import Sampler, SamplerOutput, SamplingBatch
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext

NAME = "replay"
PROPOSERS._table.setdefault(NAME, f"{__name__}:Replay")
MOST_SEEDS = 400
_FACTOR = 2654435761  # Knuth's


@dataclass(slots=True)
class Imposed:
    """Says what is told and which drafts are wrong, for engines that are made later: the whole process's."""

    lies: torch.Tensor  # int64 [W]: 1 at the positions whose drafts are
    period: int = 1 << 30  # tokens after which the text begins anew
    beside: str | None = None  # the method of another drafter that runs, too


IMPOSED = Imposed(torch.zeros(1, dtype=torch.int64))


def text_at(positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The token of every request at these positions."""
    return (positions % IMPOSED.period * _FACTOR % (1 << 32) >> 7) % vocab_size


@contextmanager
def told() -> Iterator[None]:
    """Engines that are made meanwhile say what the text says."""
    captured = mock.patch.object(static_step, "SAMPLE_TOKENS", _Told(static_step.SAMPLE_TOKENS))
    sample = Sampler.sample

    def tell(self: Sampler, logits: torch.Tensor, batch: SamplingBatch, step: SamplingStep) -> SamplerOutput:
        drawn, vocab_size = sample(self, logits, batch, step), logits.shape[1]
        return replace(drawn, token_ids=text_at(step.device_lengths.long(), vocab_size).to(drawn.token_ids.dtype))

    with captured, mock.patch.object(Sampler, "sample", tell):
        yield


class _Told:
    """Stands in the place of the table of what draws the tokens of steps over static tensors."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def on(self, device: torch.device) -> Callable[..., tuple[torch.Tensor, Any]]:
        """Draws, and tells something else."""
        draw = self._table.on(device)

        def tell(logits: torch.Tensor, *params: torch.Tensor) -> tuple[torch.Tensor, Any]:
            drawn, more = draw(logits, *params)
            return text_at(params[-1].long(), logits.shape[1]).to(drawn.dtype), more

        return tell


def tokens_a_step(lies: torch.Tensor, drafts: int, first: int, count: int) -> float:
    """Tokens that a step brings a request, which gets `count` behind its first, at position `first`."""
    position, steps, is_lie = first + 1, 0, lies.tolist()
    while position <= first + count:
        right = next((i for i in range(drafts) if is_lie[position + i]), drafts)
        position, steps = position + right + 1, steps + 1
    return count / steps


def lies_for(tau: float | None, drafts: int, first: int, count: int, width: int) -> torch.Tensor:
    """int64 [W] that brings as nearly `tau` tokens a step as `MOST_SEEDS` draws find; None: no lies."""
    if tau is None:
        return torch.zeros(width, dtype=torch.int64)
    rate, found = acceptance(tau, drafts), []
    for seed in range(MOST_SEEDS):
        lies = lies_at(rate, width, seed)
        found.append((abs(tokens_a_step(lies, drafts, first, count) - tau), seed, lies))
    return min(found, key=lambda one: one[:2])[2]


def lies_at(share: float, width: int, seed: int = 0) -> torch.Tensor:
    """int64 [W] where such a share of drafts is right, each by itself."""
    drawn = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    return (drawn >= share).long()


def acceptance(tau: float, drafts: int) -> float:
    """The share of right drafts at which a step brings `tau` tokens, each right by itself."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafts + 1)) < tau else (low, middle)
    return low


class Replay(Proposer):
    """Its work is the device's alone, so that steps are captured with it."""

    is_capturable = True

    def __init__(self, num_draft_tokens: int, context: ProposerContext, inner: Proposer | None) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.reads_layers = () if inner is None else inner.reads_layers
        self._inner, self._vocab_size = inner, context.info.vocab_size
        self._lies = IMPOSED.lies.to(context.build.device)

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        inner, wanted = None, context.wanted
        if IMPOSED.beside is not None:
            asked = context.config.model_copy(
                update={"speculative_config": wanted.model_copy(update={"method": IMPOSED.beside})}
            )
            inner = PROPOSERS.load(IMPOSED.beside).create(replace(context, config=asked))
        return cls(wanted.most_drafts, context, inner)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The inner drafter's."""
        return () if self._inner is None else self._inner.attention_layers

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        if self._inner is not None:
            self._inner.propose(proposal)
        known = proposal.columns.num_tokens[proposal.rows].long()
        places = known[:, None] + torch.arange(self.num_draft_tokens, device=known.device)
        lies = self._lies[places.clamp(max=len(self._lies) - 1)]
        return (text_at(places, self._vocab_size) + lies) % self._vocab_size
