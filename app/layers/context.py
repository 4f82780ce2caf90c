"""Gives layers what would else be module-level state: BuildContext when made, ForwardContext when run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from app.distributed.parallel_groups import ParallelGroups
from app.kernels.attention import AttentionMetadata, AttentionOps
from app.kernels.kernel_table import KernelTable
from app.quantization.base import QuantMethod
from app.quantization.plain import PLAIN_METHOD

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class BuildContext:
    """Facts that are fixed for the life of a model."""

    dtype: torch.dtype
    device: torch.device  # where tables are made at once; weights are born on the meta device
    max_model_len: int
    attention_ops: AttentionOps
    groups: ParallelGroups
    stage_layers: range | None = None  # the layers of this pipeline stage; None: all
    quantization: QuantMethod = PLAIN_METHOD  # how linear layers store their weights
    offload_bytes: int = 0  # of weights that stay in host memory (models/layer_offload.py)
    kv_dtype: torch.dtype | None = None  # the KV cache's; None: `dtype`, as it is
    state_dtype: torch.dtype = torch.float32  # of states of recurrences
    redundant_experts: int | None = None  # copies of experts that move between ranks; None: experts stay in place
    adapts_shared: bool = False  # adapters may change what tokens share beside their experts
    is_exact: bool = False  # whether a row's bits may not depend on the others of its step (`deterministic`)
    whole_prompts: bool = False  # each in one step, of which nothing is cached (records/step_budget.py)
    whole_steps: bool = True  # all layers of a step may be one launch, where there is one (models/whole_step.py)
    has_leaves: bool = False  # nor on the number of ranks: products go over fixed leaves (layers/leaves.py)

    def kernels(self, table: KernelTable[T]) -> T:
        """The best of an operation for the device; ConfigError where it must be exact, and none is."""
        return table.on(self.device, exact=self.is_exact)

    def of_drafter(self, groups: ParallelGroups, max_model_len: int) -> BuildContext:
        """Makes the context of a small model beside it: in one stage, and whatever it holds stays where it is."""
        return replace(
            self,
            groups=groups,
            max_model_len=max_model_len,
            stage_layers=None,
            offload_bytes=0,
            redundant_experts=None,
            adapts_shared=False,
        )


@dataclass(slots=True, frozen=True)
class HiddenStates:
    """Holds what a step's layers made of its T tokens."""

    last: torch.Tensor  # [T, C] of this stage's last layer, after the final norm in the last stage
    inputs_of: Mapping[int, torch.Tensor]  # [T, C] what chosen layers read, by their number; before any norm
    of_ends: bool = False  # whether `last` is [R, C], of the last token of each of the step's rows

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> HiddenStates:
        """The same of each of its tensors."""
        inputs_of = {layer: change(x) for layer, x in self.inputs_of.items()}
        return HiddenStates(change(self.last), inputs_of, self.of_ends)


@dataclass(slots=True, frozen=True)
class ForwardContext:
    """One step, as the layers see it. Made by the model runner."""

    positions: torch.Tensor  # int64 [T]
    attention: Sequence[AttentionMetadata]  # one per attention layer of this stage; layers that plan alike share
    kv_caches: Sequence[torch.Tensor]  # one for each of them: its cache [B, ...], see its `cache_spec`
    hidden: torch.Tensor | None = None  # [T, C] from the pipeline stage before; None in the first stage
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what features bring, by name, [T, ...]
    memo: dict[object, Any] = field(default_factory=dict)  # what layers compute once a step for all of them
    wanted: frozenset[int] = frozenset()  # layers whose input features want
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # those inputs, [T, C] each
    states: Sequence[tuple[torch.Tensor, ...]] = ()  # one for each layer that attends: its states, see its `state_spec`
    # int [N]: tokens whose hidden states are read: what follows the last attention computes no others; None: all
    read: torch.Tensor | None = None
    slots: torch.Tensor | None = None  # int64 [T], where the step's tokens are some of those that attention is told of

    def keep(self, layer: int, x: torch.Tensor) -> None:
        """The layer of this number is about to read x [T, C]; behind the last one: what it gave."""
        if layer in self.wanted:
            self.kept[layer] = x

    @property
    def slot_mapping(self) -> torch.Tensor:
        """int64 [T], below 0 at padding: a token that nobody reads, and for which no expert need compute. Of any
        group of layers: they all agree on that."""
        return self.attention[0].slot_mapping if self.slots is None else self.slots

    def of_read(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [N, ...], of the tokens that are read."""
        return x if self.read is None else x.index_select(0, self.read)

    def behind(self) -> ForwardContext:
        """The step as it goes on behind the attention that leaves these tokens alone."""
        if self.read is None:
            return self
        slots = self.of_read(self.slot_mapping)
        return replace(self, positions=self.of_read(self.positions), slots=slots, read=None)

    def before_last(self) -> ForwardContext:
        """The step as all layers but the last see it."""
        return self if self.read is None else replace(self, read=None)
