"""The contract of a proposer: it guesses the next tokens of rows that have just got theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.config.speculative import SpeculativeConfig
from app.kernels.attention import AttentionMetadata
from app.kernels.rows import RowColumns
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext, ForwardContext, HiddenStates
from app.models.base import EngineModel
from app.records.worker_info import WorkerInfo
from app.worker.rows.step_inputs import StepInputs, StepView
from app.worker.rows.worker_feature import WorkerFeature


@dataclass(slots=True, frozen=True)
class ProposerContext:
    """Holds what a proposer is made from, on each rank, before the KV cache is sized."""

    config: EngineConfig
    model: EngineModel  # this stage's part of it
    info: ModelInfo
    inputs: StepInputs  # of steps, to which it may add lines; it sets them when a request enters its row
    build: BuildContext  # for layers of the proposer's own
    is_last: bool  # the stage that samples and proposes

    @property
    def wanted(self) -> SpeculativeConfig:
        """Returns what is asked for."""
        wanted = self.config.speculative_config
        assert wanted is not None, "nobody asked for a proposer"
        return wanted


@dataclass(slots=True, frozen=True)
class Proposal:
    """A step whose rows have got their tokens: what drafts are asked for, and what they may be made of.

    A step over static tensors is captured with it: then all is static, and rows that only pad are there, too. They are
    like rows that got one token, stand for row 0, and nobody takes their drafts. Of row 0, as of every row, at least
    one token is known, be it an earlier request's or nobody's: `columns.num_tokens - 1` is a place in any row.
    """

    rows: torch.Tensor  # int64 [N] those that got tokens
    num_new: torch.Tensor  # int64 [N] how many
    ends: torch.Tensor  # int64 [N] which of the step's T tokens is the last before each row's newest
    columns: RowColumns  # `num_tokens` of each row are known by now, all in its token ids (app/kernels/rows)
    view: StepView  # the step's tokens, prompts' among them; `tensors.targets` is where those that follow them stand
    hidden: HiddenStates  # of these tokens
    ctx: ForwardContext  # of these tokens, for the proposer's own layers: their plans and caches, behind the model's
    plan: Callable[[torch.Tensor, AttentionMetadata], ForwardContext]  # (positions [T], where they lie) -> another
    num_drafts: int  # that each row is to have, at most the proposer's `num_draft_tokens`; may be 0


class Proposer(WorkerFeature, ABC):
    """A feature of every rank, of which those of the last stage are asked for drafts. They must agree on them."""

    num_draft_tokens: int  # that it can propose for a row, at least 1
    is_capturable: bool = False  # whether `propose` is work on the device alone, which may be captured and replayed

    @classmethod
    @abstractmethod
    def create(cls, context: ProposerContext) -> Self:
        """That of this rank, as `speculative_config` asks for it."""

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """Layers of its own that keep something of each token; their `layer_index` counts on from the model's."""
        return ()

    @abstractmethod
    def propose(self, proposal: Proposal) -> torch.Tensor:
        """Draft tokens int [N, proposal.num_drafts], in the vocabulary, to follow the rows' known tokens; further ones
        are dropped.

        A wrong guess costs the time to compute it, and nothing else. A proposer with layers of its own is asked in
        steps without a new token, too (N = 0), and in those without drafts, so that its cache is filled.
        """

    def report_start(self, info: WorkerInfo) -> WorkerInfo:
        """The scheduler counts on so many drafts of each row, and keeps slots ready that layers propose with."""
        slots = self.num_draft_tokens if self.attention_layers else 0
        return replace(info, num_draft_tokens=self.num_draft_tokens, num_draft_slots=slots)
