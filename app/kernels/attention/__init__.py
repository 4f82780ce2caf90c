"""Paged attention (Kwon et al., "PagedAttention", SOSP 2023): the contract that every backend keeps.

A KV cache is one tensor per layer, [B, 2, Hkv, S, D]: a block's keys and values of all heads are one contiguous
region. `slot` = block_id * S + offset. Token t of the step belongs to request r with
query_start_loc[r] <= t < query_start_loc[r + 1]; its position is seq_lens[r] - (query_start_loc[r + 1] - t).
Attention is causal over the request's first `seq_lens[r]` positions, which `block_table[r]` maps to blocks.
There is no prefill or decode mode (I1): a request brings any number of query tokens.

The cache has the model's type, or it is quantized. In `KV_INT8` (int8_cache.py) each vector brings its scale, and the
cache is [B, 2, Hkv, S, D + SCALE_WIDTH]. In `KV_FP8` `kv_scales` fp32 [2, Hkv] holds a scale for the keys and one for
the values of each head. What is written is x / scale, clamped to +-`KV_FP8_MAX` and
rounded once; what is read is the stored number times its scale. Arithmetic is that of an unquantized cache, in 16 or
32 bits: stored numbers convert exactly, the key's scale joins that of the scores, the value's the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from app.errors import ConfigError

# What a layer may want of a backend beyond plain causal attention, and what to call it.
FEATURES = {
    "sliding_window": "sliding windows",
    "soft_cap": "soft caps",
    "kv_fp8": "a KV cache in fp8",
    "kv_int8": "a KV cache in int8",
    "sinks": "attention sinks",
    "alibi": "ALiBi",
    "distance_bias": "biases by distance",
}

KV_FP8 = torch.float8_e4m3fn
KV_FP8_MAX = 448.0
KV_INT8 = torch.int8
SCALE_WIDTH = 4  # numbers of int8 that a vector's scale takes behind it


@dataclass(slots=True)
class AttentionMetadata:
    """Says where the step's tokens lie; made once a step, read by every layer."""

    query_start_loc: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R], computed + scheduled
    block_table: torch.Tensor  # int32 [R, M]; entries past a request's blocks are undefined but valid ids
    slot_mapping: torch.Tensor  # int64 [T], -1 = do not write
    max_query_len: int
    max_seq_len: int
    num_decodes: int  # the first num_decodes requests have exactly one query token
    # The step may be captured and replayed with other values in these tensors: a backend may take from the host only
    # what the fields above it say (bounds), and read lengths and tables on the device.
    is_static: bool = False
    # Requests behind a static step's decodes bring any number of tokens, up to max_query_len, which only the device
    # knows, and the last one has the places that pad the step.
    holds_prompts: bool = False
    # Decodes may share prefixes (blocks at the same place in their tables): a backend that `shares_prefixes` reads
    # these once for all. The result is the same but for rounding.
    cascade: bool = False
    by_layers: bool = False  # a static step's row has too long a context for all layers at once (models/whole_step.py)
    host_starts: NDArray[np.int64] | None = None  # query_start_loc on the host, where the step was made there
    host_lens: NDArray[np.int64] | None = None  # seq_lens there: at most
    plan: object | None = None  # a backend's own precomputation for the step, filled by its `prepare`
    # `block_table` and `slot_mapping` of the further groups of layers that keep blocks of their own; a layer's own
    # metadata has its group's in the fields above.
    more_tables: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    is_apart: bool = False  # no request reads what another one writes in this step
    rows: torch.Tensor | None = None  # int32 [R], the requests' permanent rows, 0 for padding; None: nobody reads them
    # int64 [D]: which of the requests bring drafts behind a known token; None: none. Of a static step it is not said.
    drafted: NDArray[np.int64] | None = None

    def of_group(self, group: int, *, sees_all: bool) -> AttentionMetadata:
        """The same step for the layers of a group; `sees_all`: they have no window, so that they may share
        prefixes."""
        table, slots = self.more_tables[group - 1] if group else (self.block_table, self.slot_mapping)
        return replace(
            self, block_table=table, slot_mapping=slots, cascade=self.cascade and sees_all, plan=None, more_tables=()
        )


@dataclass(slots=True, frozen=True)
class HeadBias:
    """Holds what query heads have of their own in their softmax, in fp32, [Hq] each but where it says more: of this
    rank's heads, in their order."""

    # The logit of a key that every token sees besides its own, and whose value is 0 (attention sink: GPT-OSS).
    sinks: torch.Tensor | None = None
    # What is added to a (scaled, capped) score for each position that the key lies before the query, negated: ALiBi
    # (Press et al., "Train Short, Test Long", 2022).
    slopes: torch.Tensor | None = None
    # [Hq, N]: what is added to a (scaled, capped) score whose key lies 0, 1, ... N - 1 positions before the query; keys
    # further away have that of N - 1 (T5: Raffel et al., 2020).
    by_distance: torch.Tensor | None = None


@dataclass(slots=True, frozen=True)
class HeadNorm:
    """RMS norms of single query and key heads, before they are rotated."""

    query_weight: torch.Tensor  # [D]
    key_weight: torch.Tensor  # [D]
    eps: float


@dataclass(slots=True, frozen=True)
class AttentionOptions:
    """Holds what a layer says of its attention beside the tensors."""

    scale: float  # of the products of queries and keys
    sliding_window: int | None = None  # positions that a query sees, itself included; None: all before it
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    kv_scales: torch.Tensor | None = None  # fp32 [2, Hkv] of a quantized cache
    bias: HeadBias | None = None


@dataclass(slots=True)
class EncodedStep:
    """Says what each token of a step reads of an encoder's output, in slots of equally many blocks; made once a step,
    read by every layer."""

    slots: torch.Tensor  # int32 [T]
    lengths: torch.Tensor  # int32 [T], positions of the slot that count, at least one
    num_positions: int  # most of a slot
    scratch: object | None = None  # a kernel's own


ENCODED_TOKENS = 64  # most of a step that a kernel of its own attends for
# (query [T, H, D], kv_cache [B, 2, H, S, D] of its dtype, step, scale) -> [T, H, D]
EncodedAttention = Callable[[torch.Tensor, torch.Tensor, EncodedStep, float], torch.Tensor]


def _paged_alone(head_dim: int, num_positions: int) -> EncodedAttention | None:
    return None


# What FusedOps.rotate_and_write and `paged_attention` do, one behind the other, in one launch: (heads [T, Hq + 2 Hkv,
# D], cos, sin, norm, kv_cache, meta, options) -> [T, Hq, D]; None: not for such a step or layer.
AttendAtOnce = Callable[
    [
        torch.Tensor, torch.Tensor, torch.Tensor, HeadNorm | None, torch.Tensor, AttentionMetadata, AttentionOptions,
    ],
    torch.Tensor | None,
]  # fmt: skip


def _one_by_one(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor | None:
    return None


@dataclass(slots=True, frozen=True)
class AttentionOps:
    """One backend: `prepare(meta)` once a step, then per layer `write_kv` and `paged_attention`.

    A backend must take every step whose layers ask for no more than its `features`, on its `device_types`, in fp32 and
    in 16 bits; for what it does not serve it gets None, and no `bias` at all. `prepare` raises ConfigError for sizes
    that it does not serve. A slot that no token sees may hold any finite number.
    """

    prepare: Callable[..., None]  # (meta: AttentionMetadata, *, num_heads, num_kv_heads, head_dim, block_size) -> None
    # (key [T, Hkv, D], value [T, Hkv, D], kv_cache [B, 2, Hkv, S, D], slot_mapping int64 [T], kv_scales=None) -> None;
    # a cache of KV_INT8 is SCALE_WIDTH wider
    write_kv: Callable[..., None]
    # (query [T, Hq, D], kv_cache [B, 2, Hkv, S, D], meta, *, scale, sliding_window=None, soft_cap=None, kv_scales=None,
    # bias=None) -> [T, Hq, D]; `bias` is given only where a layer has one
    paged_attention: Callable[..., torch.Tensor]
    device_types: tuple[str, ...] = ("cuda",)  # where it runs
    shares_prefixes: bool = False  # whether it heeds AttentionMetadata.cascade
    # Whether a step with `is_static` can be captured and replayed: kernels alone, launched from host bounds.
    is_capturable: bool = False
    # Which of FEATURES it serves: layers that want another are refused by name. None of them unless it says so.
    features: frozenset[str] = frozenset()
    # Whether a token's result is the same to the bit whatever else its step brings (the option `deterministic`).
    is_exact: bool = False
    # "module:attribute" of the MLAOps by which it serves latent attention (app/kernels/mla), imported where a model has
    # it; "": it serves none.
    latent: str = ""
    # Given a head's size and the most positions of a slot: its kernel for few tokens that attend to an encoder's
    # output; None: paged_attention does that, too.
    encoded: Callable[[int, int], EncodedAttention | None] = _paged_alone
    at_once: AttendAtOnce = _one_by_one
    name: str = ""  # in the table; the selector fills it in

    def require(self, **wanted: bool) -> None:
        """ConfigError names the first of the wanted FEATURES that the backend does not serve."""
        if missing := next((name for name, is_wanted in wanted.items() if is_wanted and name not in self.features), ""):
            raise ConfigError(
                f"attention_backend={self.name}: it does not serve {FEATURES[missing]}, which this model's layers "
                "have; use auto",
                param="attention_backend",
            )
