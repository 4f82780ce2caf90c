"""Says what the worker must know of a layer that attends: the cache it keeps, and how its steps are planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Literal

import torch

from app.kernels.attention import KV_FP8, KV_INT8, SCALE_WIDTH, AttentionMetadata, AttentionOps
from app.layers.cache_spec import LayerCacheSpec, LayerStateSpec
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.weight import ShapeMismatch

KVScaleKind = Literal["kv", "k", "v"]  # of keys and values alike, of keys, of values
_SCALE_ROWS: dict[KVScaleKind, list[int]] = {"kv": [0, 1], "k": [0], "v": [1]}


class AttentionLayer(Layer, ABC):
    """`layer_index` is its number among those of this pipeline stage: of its metadata, and of its KV cache."""

    layer_index: int
    is_capturable: bool = False  # whether a decode step with it may be captured and replayed (AttentionOps)
    captures_prompts: bool = False  # and a step with prompts (AttentionMetadata.holds_prompts),
    captures_context: bool = True  # behind what is cached of them, too
    shares_prefixes: bool = False  # whether it heeds AttentionMetadata.cascade
    # Queries of up to so many tokens take more memory a token than longer ones; 0: all take the same.
    short_query: int = 0
    kv_scales: torch.Tensor | None = None  # of a quantized cache, fp32; None: it is not quantized

    @property
    @abstractmethod
    def plan_key(self) -> Hashable:
        """Layers with the same key share a step's plan."""

    @abstractmethod
    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Set `meta.plan` for a step, once for all layers of the key."""

    @abstractmethod
    def cache_spec(self) -> LayerCacheSpec | None:
        """Returns what the layer caches for each token on this rank; None: nothing."""

    def state_spec(self) -> LayerStateSpec | None:
        """Returns what the layer keeps of each request on this rank, beside that; None: nothing."""
        return None

    def set_kv_scales(self, kind: KVScaleKind, scales: torch.Tensor) -> None:
        """Take a checkpoint's scales of a quantized cache, fp32 [n]; ShapeMismatch for an n that cannot be."""
        raise NotImplementedError(f"{type(self).__name__} keeps no scales")

    def reset_kv_scales(self) -> None:
        """Forgets what a checkpoint said of a quantized cache."""
        if self.kv_scales is not None:
            self.kv_scales.fill_(1.0)


class KVAttentionLayer(AttentionLayer):
    """An attention layer that caches keys and values of heads in the paged cache."""

    num_heads: int  # on this rank, as all that follows
    num_kv_heads: int
    first_kv_head: int  # among those of the model
    whole_kv_heads: int  # of the model
    head_dim: int
    sliding_window: int | None
    ops: AttentionOps
    kv_dtype: torch.dtype
    kv_scales: torch.Tensor | None  # [2, Hkv]: keys, values; None: not in fp8

    def choose_cache(self, ctx: BuildContext, **wanted: bool) -> None:
        """Set backend, type and scales of the cache once the heads are known; `wanted`: what the layer wants of the
        backend besides. ConfigError names what it does not serve."""
        self.ops, self.kv_dtype = ctx.attention_ops, ctx.kv_dtype or ctx.dtype
        is_fp8 = self.kv_dtype == KV_FP8
        self.kv_scales = torch.ones(2, self.num_kv_heads, dtype=torch.float32, device=ctx.device) if is_fp8 else None
        self.ops.require(kv_fp8=is_fp8, kv_int8=self.kv_dtype == KV_INT8, **wanted)

    @property
    def plan_key(self) -> Hashable:
        """The backend and the numbers of heads on this rank: layers that agree on them share a plan."""
        return self.ops, self.num_heads, self.num_kv_heads, self.head_dim

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Let the backend plan the step."""
        self.ops.prepare(
            meta,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
        )

    def cache_spec(self) -> LayerCacheSpec | None:
        """Keys and values."""
        return self.kv_spec()

    def kv_spec(self) -> LayerCacheSpec:
        """Keys and values of this rank's KV heads."""
        width = self.head_dim + (SCALE_WIDTH if self.kv_dtype == KV_INT8 else 0)
        return LayerCacheSpec((2, self.num_kv_heads), width, self.kv_dtype, self.sliding_window)

    def set_kv_scales(self, kind: KVScaleKind, scales: torch.Tensor) -> None:
        """One number, or one for each KV head of the model, of which this rank's are taken."""
        assert self.kv_scales is not None, "the cache is not quantized"
        if len(scales) not in (1, self.whole_kv_heads):
            shape = list(scales.shape)
            raise ShapeMismatch(f"has shape {shape}, not one number or one for each of {self.whole_kv_heads} KV heads")
        own = scales.expand(self.whole_kv_heads)[self.first_kv_head : self.first_kv_head + self.num_kv_heads]
        self.kv_scales[_SCALE_ROWS[kind]] = own.to(self.kv_scales.device)
