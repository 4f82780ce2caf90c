"""One forward pass of transformers' modules on the meta device: who attends, who multiplies, who reads the same input.

Nothing is computed. The masks that a model asks for are functions of two positions, which are tried at some: so a
window is known whatever the configuration calls it, and a mask that is neither causal nor a window is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from app.errors import UnsupportedError

TRACED = "manta_traced"  # the attention implementation while a model is traced
NUM_TOKENS = 5
_ALONG = ("sliding_window", "softcap", "is_causal", "s_aux")  # what may come along, beside what changes nothing
_MASK = "_manta_mask"


@dataclass(slots=True, frozen=True)
class MaskKind:
    """Says what a mask lets a token see."""

    sliding_window: int | None  # tokens, itself included; None: all before it


@dataclass(slots=True, frozen=True)
class AttentionCall:
    """One call of the attention function."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float | None
    soft_cap: float | None
    sliding_window: int | None
    has_sinks: bool  # a logit of each head that no key gives


@dataclass(slots=True)
class Trace:
    """Records what a forward pass did, in its order."""

    attention: list[AttentionCall] = field(default_factory=list)
    linears: list[tuple[nn.Module, torch.Tensor]] = field(default_factory=list)  # and what they read


def trace(hf: Any, forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Trace:
    """Trace `forward`(input ids, positions, attention mask: each [1, T]) of a model whose parameters are on meta.

    UnsupportedError names what the modules do that we cannot.
    """
    found = Trace()
    seen: set[nn.Module] = set()

    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *_: Any, **more: Any
    ) -> Any:
        if module in seen:
            raise _refused(f"it runs {type(module).__name__} more than once in a step")
        seen.add(module)
        found.attention.append(_attention_call(module, query, key, value, attention_mask, more))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(TRACED, attend)
    AttentionMaskInterface.register(TRACED, _mask)
    ones = torch.ones(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    with torch.device("cpu"), ExitStack() as stack:
        stack.enter_context(_on_meta(hf))
        for module in hf.modules():
            if type(module) is nn.Linear:
                hook = module.register_forward_pre_hook(lambda m, args: found.linears.append((m, args[0])))
                stack.callback(hook.remove)
        try:
            forward(ones, ones, ones)
        except UnsupportedError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, IndexError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise _refused(f"its forward pass needs more than shapes and positions ({first})") from error
    if not found.attention and hf.config._attn_implementation == TRACED:
        raise _refused("none of its modules calls the attention interface")
    return found


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(reason, param="model")


def _attention_call(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, more: dict[str, Any]
) -> AttentionCall:
    odd = [n for n, x in more.items() if n not in _ALONG and isinstance(x, torch.Tensor) and x.shape != (1, NUM_TOKENS)]
    if odd:
        raise _refused(f"attention with {', '.join(sorted(odd))}")
    if key.shape[2] != query.shape[2]:
        raise _refused("attention to other tokens than the step's (cross attention)")
    kind = getattr(mask, _MASK, None)
    if not isinstance(kind, MaskKind) or more.get("is_causal") is False:
        raise _refused("attention that is not causal, or whose mask transformers does not make")
    if query.shape[3] != key.shape[3] or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise _refused(f"heads of odd shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}")
    return AttentionCall(
        module,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=more.get("scaling"),
        soft_cap=more.get("softcap"),
        sliding_window=kind.sliding_window,
        has_sinks=more.get("s_aux") is not None,
    )


def _mask(*_: Any, mask_function: Callable[..., Any], **more: Any) -> torch.Tensor:
    """A mask of no contents that says what kind it would be."""
    window = more.get("local_size")
    around = torch.tensor(
        [0, 1, 2, 5] if window is None else [0, 1, window - 1, window, window + 1, 2 * window], device="cpu"
    )
    query, key = around.clamp(min=0)[:, None], around.clamp(min=0)[None]
    zero = torch.zeros_like(query)
    sees = torch.as_tensor(mask_function(zero, zero, query, key)).expand(len(around), len(around))
    expected = key <= query
    if window is not None:
        expected = expected & (key > query - window)
    mask = torch.empty(0, device="cpu")
    if torch.equal(sees, expected):
        setattr(mask, _MASK, MaskKind(window))
    return mask


@contextmanager
def _on_meta(hf: nn.Module) -> Iterator[None]:
    """The buffers, which are real, on the meta device like the parameters."""
    real = [(module, dict(module._buffers)) for module in hf.modules() if module._buffers]
    for module, buffers in real:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    try:
        yield
    finally:
        for module, buffers in real:
            module._buffers.update(buffers)
