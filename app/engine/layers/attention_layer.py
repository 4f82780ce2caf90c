"""What the worker must know of a layer that attends: the cache it keeps, and how its steps are planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

from app.engine.layers.cache_spec import LayerCacheSpec
from app.engine.layers.layer import Layer
from app.kernels.attention import AttentionMetadata


class AttentionLayer(Layer, ABC):
    """`layer_index` is its number among those of this pipeline stage: of its metadata, and of its KV cache."""

    layer_index: int
    is_capturable: bool = False  # whether a decode step with it may be captured and replayed (AttentionOps)
    shares_prefixes: bool = False  # whether it heeds AttentionMetadata.cascade

    @property
    @abstractmethod
    def plan_key(self) -> Hashable:
        """Layers with the same key share a step's plan."""

    @abstractmethod
    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Set `meta.plan` for a step, once for all layers of the key."""

    @abstractmethod
    def cache_spec(self) -> LayerCacheSpec | None:
        """What the layer caches for each token on this rank; None: nothing."""
