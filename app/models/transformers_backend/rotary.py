"""transformers' rotation of queries and keys, left to the kernel that also writes them into the cache.

A modeling file has a function `apply_rotary_pos_emb`. Where that turns halves of heads, as ours does (tried on random
numbers), an attention module gets a copy of its forward method in which the name means ours: queries and keys that are
parts of one product, beside its values, stay as they are, and the attention call that follows turns and stores them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from app.kernels.fused.reference import rotate
from app.layers.context import ForwardContext
from app.models.transformers_backend.linears import Siblings

_NAME = "apply_rotary_pos_emb"


class PendingRotation:
    """The rotation of one attention module, between its two calls."""

    def __init__(self, original: Callable[..., Any], siblings: Siblings) -> None:
        self.original = original
        self.siblings = siblings
        siblings.is_watched = True
        self.is_in_use = True  # until a trace shows that something happens to queries and keys in between
        self._pending: tuple[torch.Tensor, ...] | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, *more: Any, **named: Any) -> Any:
        """In the place of `apply_rotary_pos_emb`: query [1, Hq, T, D], key [1, Hkv, T, D], cos and sin [1, T, D]."""
        if not self.is_in_use or named or len(more) != 2 or not self._are_parts(query, key, *more):
            return self.original(query, key, *more, **named)
        self._pending = (query, key, *more)
        return query, key

    def take(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(the product [T, Hq + 2 Hkv, D], cos, sin) where the attention call is the rotation's; None: all is done."""
        pending, self._pending = self._pending, None
        whole = self.siblings.outputs
        self.siblings.outputs = None
        if pending is None:
            return None
        assert whole is not None
        if query is not pending[0] or key is not pending[1] or not self._is_last(value, whole, query, key):
            assert query.is_meta, "the trace has seen another flow"
            self.is_in_use = False
            return None
        return whole.view(-1, query.shape[1] + 2 * key.shape[1], query.shape[3]), pending[2], pending[3]

    def _are_parts(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        whole = self.siblings.outputs
        if whole is None or query.shape[0] != 1 or cos.shape != (1, query.shape[2], query.shape[3]):
            return False
        first = query.shape[1] * query.shape[3]
        return cos.shape == sin.shape and _lies(query, whole, 0) and _lies(key, whole, first)

    @staticmethod
    def _is_last(value: torch.Tensor, whole: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
        size = query.shape[3]
        fits = whole.shape[-1] == (query.shape[1] + 2 * key.shape[1]) * size and value.shape == key.shape
        return fits and _lies(value, whole, (query.shape[1] + key.shape[1]) * size)


def _lies(heads: torch.Tensor, whole: torch.Tensor, offset: int) -> bool:
    """True if heads [1, H, T, D] are the columns of `whole` [1, T, N] from `offset` on."""
    num_heads, num_tokens, size = heads.shape[1:]
    strides = (num_heads == 1 or heads.stride(1) == size) and (num_tokens == 1 or heads.stride(2) == whole.shape[-1])
    here = heads.storage_offset() == whole.storage_offset() + offset
    return strides and here and heads.stride(3) == 1 and _storage(heads) == _storage(whole)


def _storage(x: torch.Tensor) -> int:
    """The identity of a tensor's memory, also on the meta device."""
    return int(x.untyped_storage()._cdata)


def exchange_rotation(module: nn.Module) -> PendingRotation | None:
    """Give an attention module its own rotation; None where it stays as it is."""
    forward = type(module).forward
    siblings = next((child for child in module.children() if isinstance(child, Siblings)), None)
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names or siblings is None:
        return None
    original = forward.__globals__.get(_NAME)
    if original is None or not turns_halves(original):
        return None
    pending = PendingRotation(original, siblings)
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, _NAME: pending},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)
    return pending


def turns_halves(function: Callable[..., Any]) -> bool:
    """True if it is our rotation, on random numbers."""
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32)

        query, key, half = draw(1, 2, 3, 8), draw(1, 1, 3, 8), draw(1, 3, 4)
        cos, sin = torch.cat((half, half), -1), torch.cat((half + 1, half + 1), -1)
        try:
            found = function(query, key, cos, sin)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return False
        ours = [rotate(x[0].transpose(0, 1), cos[0][:, None], signed(sin)) for x in (query, key)]
        return all(torch.allclose(x[0].transpose(0, 1), own, atol=1e-6) for x, own in zip(found, ours, strict=True))


def signed(sin: torch.Tensor) -> torch.Tensor:
    """transformers' sin [1, T, D] as our kernels take it: [T, 1, D], the first half negated."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), dim=-1)


def angles(ctx: ForwardContext, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as our kernels take them; made once a step."""
    key = ("angles", id(sin))
    found = ctx.memo.get(key)
    if found is None:
        ctx.memo[key] = found = (cos[0][:, None].contiguous(), signed(sin), sin)  # sin is kept, so its id stays its own
    return found[0], found[1]
