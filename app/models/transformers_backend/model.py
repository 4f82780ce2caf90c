"""A causal model of transformers as the worker sees models."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.layers.context import BuildContext, ForwardContext
from app.models.base import EngineModel
from app.models.transformers_backend.attention import IMPLEMENTATION, PLACE, PagedAttention, Step
from app.models.transformers_backend.deferral import Site, tensor_of
from app.models.transformers_backend.experts import prepare_experts
from app.models.transformers_backend.linears import exchange_linears
from app.models.transformers_backend.mlp import exchange_mlps
from app.models.transformers_backend.names import CheckpointNames
from app.models.transformers_backend.norms import exchange_norms
from app.models.transformers_backend.parameters import claim_parameters, exchange_ends
from app.models.transformers_backend.rope import fix_ropes
from app.models.transformers_backend.skeleton import Skeleton, build_skeleton, place_buffers
from app.models.transformers_backend.tracing import TRACED, Trace, trace

PREFIX = "hf."


class TransformersForCausalLM(EngineModel):
    """transformers' modules, under its own names behind `hf.`."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        try:
            skeleton = build_skeleton(ctx, info)
            self._build(ctx, skeleton)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{info.architecture} does not run through transformers' modules: {error.message}", param="model"
            ) from error

    def _build(self, ctx: BuildContext, skeleton: Skeleton) -> None:
        hf, trunk, plan = skeleton.hf, skeleton.trunk, skeleton.tp_plan
        self.hf = hf
        self._trunk = (trunk,)  # a part of `hf`
        self.tied, self.step = skeleton.tied, Step()
        self._given: torch.Tensor | None = None
        self._names = CheckpointNames(hf)
        self._computes = trunk.forward
        fix_ropes(hf, ctx.max_model_len)
        captures = prepare_experts(hf, ctx, plan)
        hf.config._attn_implementation = TRACED
        first = self._traced()
        norms = exchange_norms(trunk, ctx)
        exchange_mlps(
            trunk, ctx, {name.removeprefix(f"{hf.base_model_prefix}."): style for name, style in plan.items()}
        )
        exchange_linears(hf, trunk, ctx, first, plan)
        exchange_ends(hf, ctx, skeleton.tied)
        calls = zip(self._traced().attention, first.attention, strict=True)
        for index, (call, whole) in enumerate(calls):
            layer = PagedAttention(ctx, call, whole, self.step, layer_index=index, is_capturable=captures)
            call.module.add_module(PLACE, layer)
        hf.config._attn_implementation = IMPLEMENTATION
        self._settle(norms)
        trunk.forward = self._compute
        self._check_head(hf.config.hidden_size, ctx.dtype)
        claim_parameters(hf, ctx, plan, self._names)
        place_buffers(hf, ctx.device)

    def _settle(self, norms: list[Any]) -> None:
        """A last trace, with all in its place: what is deferred to what."""
        for norm in norms:
            norm.begin()
        self._traced()
        for norm in norms:
            norm.settle()
        for module in self.hf.modules():
            if isinstance(site := getattr(module, "site", None), Site):
                site.settle()

    def _check_head(self, size: int, dtype: torch.dtype) -> None:
        """UnsupportedError where logits are not what the head makes of the base model's hidden states."""
        try:
            logits = self.raw_logits(torch.empty(2, size, dtype=dtype, device="meta"))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise UnsupportedError(
                f"its head does not take the states of its base model ({error})", param="model"
            ) from error
        if not logits.is_meta or logits.shape[0] != 2:
            raise UnsupportedError("its head does not take the states of its base model", param="model")

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        self.step.context = ctx
        out = self._trunk[0](input_ids=input_ids[None], position_ids=ctx.positions[None], use_cache=False)
        self.step.context = None
        return tensor_of(out.last_hidden_state)[0]  # type: ignore[no-any-return]

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> [N, V]: what the model's own forward does after its base model."""
        self._given = hidden[None]
        logits: torch.Tensor = self.hf(input_ids=None).logits[0]
        self._given = None
        return logits

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel.own_tensors."""
        return ((PREFIX + own, part) for own, part in self._names.own(name, tensor))

    def own_name(self, name: str) -> str | None:
        """See EngineModel.own_name."""
        own = self._names.own_name(name)
        return None if own is None else PREFIX + own

    @property
    def attention_layers(self) -> list[Any]:
        """See EngineModel.attention_layers; modules may stand in another order than they are called in."""
        return sorted(super().attention_layers, key=lambda layer: layer.layer_index)

    def _compute(self, *args: Any, **options: Any) -> Any:
        """The base model's forward; while logits are computed, the hidden states that are known already."""
        return self._computes(*args, **options) if self._given is None else _Known(last_hidden_state=self._given)

    def _traced(self) -> Trace:
        trunk = self._trunk[0]
        return trace(
            self.hf,
            lambda ids, positions, mask: trunk(
                input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
            ),
        )


class _Known(SimpleNamespace):
    """The output of a base model that has nothing but hidden states."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None
