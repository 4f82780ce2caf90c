"""One rank's part of the model over its KV cache: from token ids to hidden states, and on to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from app.distributed.stage_link import StageLink
from app.errors import UnsupportedError
from app.kernels.attention import AttentionMetadata
from app.kernels.recurrent import StateStep
from app.layers.attention_layer import AttentionLayer
from app.layers.context import ForwardContext, HiddenStates
from app.models.base import EngineModel
from app.worker.attention.kv_cache import KVCache

Chosen = slice | torch.Tensor | None  # of a step's tokens; None: all of them


class ForwardPass:
    """Computes steps. Between pipeline stages, `run` takes hidden states in and sends them on.

    What travels between stages is as wide as the hidden states and what features want of layers before
    (`WorkerFeature.reads_layers`), side by side.
    """

    def __init__(
        self,
        model: EngineModel,
        cache: KVCache,
        link: StageLink,
        vocab_size: int,
        dtype: torch.dtype,
        more_layers: Sequence[AttentionLayer] = (),  # that attend beside the model's, in the order of their caches
        stage_layers: range | None = None,  # the model's in this stage; None: all
    ) -> None:
        self.cache = cache
        self.link = link
        self.vocab_size = vocab_size
        self.dtype = dtype  # the type of hidden states and logits
        self.model = model
        # Within these a head computes logits of some of the step's tokens, or classes of these rows' requests.
        self.within_logits: Callable[[Chosen], AbstractContextManager[object]] = nullcontext
        self.within_classes: Callable[[Sequence[int]], AbstractContextManager[object]] = nullcontext
        # Within these states go through tokens once more, which stay (app/worker/spec_decode/drafted_states.py).
        self.within_states: Callable[[StateStep], AbstractContextManager[object]] = nullcontext
        self._reads_ends = False
        self._stage_layers = stage_layers
        self._wanted: frozenset[int] = frozenset()
        self._from_before: list[int] = []  # of the wanted ones, those of earlier stages
        self._to_next: list[int] = []  # those that the next stage needs
        layers = [*model.attention_layers, *more_layers]
        keys = [(group, layer.plan_key) for group, layer in zip(cache.spec.groups_of(layers), layers, strict=True)]
        planned = dict(zip(reversed(keys), reversed(layers), strict=True))  # a layer of those that plan alike
        self._planned = list(planned.values())
        self._groups = [group for group, _ in planned]  # of each of them
        self._plan_of = [list(planned).index(key) for key in keys]

    def want(self, layers: Sequence[int]) -> None:
        """From now on steps keep what these layers of the model read. UnsupportedError where it does not show it."""
        if layers and not self.model.keeps_inputs:
            raise UnsupportedError(
                f"{type(self.model).__name__} does not show what its layers read, which a feature of this engine wants"
            )
        own = self._stage_layers or range(1 << 30)
        self._wanted = frozenset(layers)
        self._from_before = sorted(layer for layer in layers if layer < own.start)
        self._to_next = [] if self.link.is_last else sorted(layer for layer in layers if layer < own.stop)

    def read_ends(self) -> None:
        """From now on the head reads the hidden states of rows' last tokens alone."""
        self._reads_ends = True

    @property
    def reads_ends(self) -> bool:
        """True if others need not be computed, but for features that say so (`WorkerFeature.reads_all`)."""
        return self._reads_ends and self.link.is_last and self.model.heeds_read and not self._wanted

    @property
    def is_capturable(self) -> bool:
        """True if a decode step may be captured and replayed with other inputs."""
        return all(layer.is_capturable for layer in self._planned)

    @property
    def captures_prompts(self) -> bool:
        """True if a step with prompts may be, too."""
        return all(layer.captures_prompts for layer in self._planned)

    @property
    def captures_context(self) -> bool:
        """True if those prompts may stand behind cached tokens."""
        return all(layer.captures_context for layer in self._planned)

    @property
    def received_width(self) -> int:
        """Numbers that the stage before sends of each token."""
        return self.link.hidden_size * (1 + len(self._from_before))

    @property
    def sent_width(self) -> int:
        """Numbers that go to the next stage of each token."""
        return self.link.hidden_size * (1 + len(self._to_next))

    def release(self) -> None:
        """Memory that captured steps read no longer holds what it held: forget them. There are none here."""

    def receive(self, num_tokens: int) -> torch.Tensor | None:
        """[T, received_width] from the stage before; None in the first stage."""
        return self.link.receive_hidden(num_tokens, self.received_width)

    def run(self, input_ids: torch.Tensor, ctx: ForwardContext) -> HiddenStates:
        """`compute`, and pass on what the next stage needs."""
        hidden = self.compute(input_ids, ctx)
        if not self.link.is_last:
            self.link.send_hidden(self.to_send(hidden))
        return hidden

    def context(
        self,
        positions: torch.Tensor,
        attention: AttentionMetadata,
        received: torch.Tensor | None = None,
        layer_inputs: Mapping[str, torch.Tensor] | None = None,
        ends: torch.Tensor | None = None,
    ) -> ForwardContext:
        """A step of T tokens as layers see it; `received` [T, received_width] comes from the stage before; `ends` [R]:
        rows' last tokens, if hidden states of others are not read."""
        hidden, kept = received, {}
        if received is not None and self._from_before:
            hidden, *earlier = (part.contiguous() for part in torch.split(received, self.link.hidden_size, dim=1))
            kept = dict(zip(self._from_before, earlier, strict=True))
        return ForwardContext(
            positions,
            self._plan(attention),
            self.cache.tensors,
            hidden,
            layer_inputs or {},
            wanted=self._wanted,
            kept=kept,
            states=self.cache.states,
            read=ends,
        )

    def compute(self, input_ids: torch.Tensor, ctx: ForwardContext) -> HiddenStates:
        """int [T], or the context's hidden states of the stage before -> hidden states; the tokens' keys and values go
        into the cache."""
        last: torch.Tensor = self.model(input_ids, ctx)
        return HiddenStates(last, ctx.kept, ctx.read is not None)

    def to_send(self, hidden: HiddenStates) -> torch.Tensor:
        """[T, sent_width] for the next stage."""
        if not self._to_next:
            return hidden.last
        return torch.cat([hidden.last, *(hidden.inputs_of[layer] for layer in self._to_next)], dim=1)

    def logits(self, hidden: torch.Tensor, chosen: Chosen = None) -> torch.Tensor:
        """Hidden states [N, C] of the chosen tokens -> fp32 [N, V]; in the last stage."""
        return self.raw_logits(hidden, chosen).float()

    def raw_logits(self, hidden: torch.Tensor, chosen: Chosen = None) -> torch.Tensor:
        """The same in the model's type."""
        with self.within_logits(chosen):
            return self.model.raw_logits(hidden)

    def _plan(self, attention: AttentionMetadata) -> list[AttentionMetadata]:
        """The plan of each attention layer; one object for all where all plan alike."""
        if attention.more_tables:
            windows = self.cache.spec.windows
            metas = [attention.of_group(group, sees_all=windows[group] is None) for group in self._groups]
        else:
            metas = [attention, *(replace(attention) for _ in self._planned[1:])]
        for layer, meta in zip(self._planned, metas, strict=True):
            layer.plan(meta, self.cache.spec.block_size)
        return [metas[index] for index in self._plan_of]
