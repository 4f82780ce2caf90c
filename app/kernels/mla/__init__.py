"""Multi-head latent attention (MLA: DeepSeek-V2, 2024): the contract that every backend keeps.

A cache is one tensor per layer, [B, S, R + Dr]: of each token its latent, of R numbers, and one rotated key of Dr that
all heads share. Blocks, slots and a step's metadata are those of paged attention (app/kernels/attention), causal too.
A head's key is (K_h c, rotated key) and its value V_h c, of a latent c; `up` [H, Dn + Dv, R] holds the rows of K_h and
below them those of V_h. Two ways to the same result, for whichever is cheaper:

- `attend`: queries come as (K_h^T q, rotated query) and meet the latents as they lie in the cache, one key for all
  heads, whose first R numbers are the value too. The caller takes the result [T, H, R] through V_h.
- `attend_expanded`: queries come as they are; keys and values of the contexts are computed from the latents, as many
  tokens at a time as `workspace` holds, and the parts joined by the logarithms of their sums.

A quantized cache (KV_FP8) comes with one scale for all of it, fp32 [1]: a latent is the stored number times the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.errors import ConfigError
from app.kernels.attention import AttentionOps
from app.kernels.mla.heads import head_products
from app.registry import load_entry

WORKSPACE_BYTES = 128 << 20
_LEAST_CHUNK = 256  # tokens: fewer at a time leave a GPU idle


@dataclass(slots=True, frozen=True)
class MLAOps:
    """One implementation, in fp32 and in 16 bits: `prepare` once for each part of a step, then either way per layer."""

    # (meta: AttentionMetadata, *, num_heads, block_size) -> None; sets meta.plan. ConfigError for sizes that it does
    # not serve.
    prepare: Callable[..., None]
    # (query [T, H, R + Dr], cache [B, S, R + Dr], meta, *, scale, latent_size, kv_scale=None) -> [T, H, R]
    attend: Callable[..., torch.Tensor]
    # (query [T, H, Dn + Dr], cache [B, S, R + Dr], meta, up [H, Dn + Dv, R], workspace [W, H, Dn + Dv], *, scale,
    # value_dim, kv_scale=None) -> [T, H, Dv]
    attend_expanded: Callable[..., torch.Tensor]
    # (x [T, H, K], weight [H, K, N], out [T, H, N]) -> None: the products before and behind `attend`, head by head; any
    # strides, but rows lie in one piece
    head_products: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = head_products
    is_capturable: bool = False  # whether `attend` in a static step can be captured and replayed


def mla_ops(backend: AttentionOps) -> MLAOps:
    """Those that an attention backend names; ConfigError where it names none."""
    if not backend.latent:
        raise ConfigError(
            f"attention_backend={backend.name}: it does not serve latent attention, which this model's layers have; "
            "use auto",
            param="attention_backend",
        )
    ops = load_entry(backend.latent)
    if not isinstance(ops, MLAOps):
        raise ConfigError(
            f"attention_backend={backend.name}: its latent={backend.latent!r} is no MLAOps", param="attention_backend"
        )
    return ops


def chunk_tokens(num_heads: int, head_width: int, itemsize: int, max_model_len: int) -> int:
    """W: tokens whose keys and values are expanded at a time, of `num_heads` times `head_width` numbers each."""
    most = max(_LEAST_CHUNK, WORKSPACE_BYTES // (num_heads * head_width * itemsize))
    return min(most, max_model_len)
