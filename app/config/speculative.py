"""Speculative decoding: the section `speculative_config` of an engine, with vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from app.backends import PROPOSERS
from app.config.frozen import Frozen
from app.registry import OneOf, suggestion

DEFAULT_LOOKUP = 5  # tokens, where neither end of the lookup is given

_WITH_MODEL = "drafters with weights are not there yet; ngram needs none"
_SUFFIX = "suffix decoding is not there yet; ngram looks through the request's own tokens"
_EXACT = "a draft is kept where it is the very token that is sampled in its place, so tokens never change; leave it out"
_CODE = "code of one's own that drafts is not there yet; take ngram"

# What vLLM has and we have not, and what to do about it.
METHODS: Mapping[str, str] = {
    **dict.fromkeys(
        ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash", "dspark"), _WITH_MODEL
    ),
    "suffix": _SUFFIX,
    "custom_class": _CODE,
    "extract_hidden_states": "hidden states are not given out; it drafts nothing",
}
KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("model", "draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend"),
            *("attention_backend", "kv_cache_dtype", "max_model_len", "revision", "code_revision"),
            *("index_share_for_mtp_iteration", "disable_padded_drafter_batch", "disable_eagle_block_drop"),
            *("use_local_argmax_reduction", "use_heterogeneous_vocab", "parallel_drafting", "draft_load_config"),
            *("draft_sample_method", "dspark_draft_topk", "enable_adaptive_verification", "speculative_token_tree"),
        ),
        _WITH_MODEL,
    ),
    **dict.fromkeys(
        (
            *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
            *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        ),
        _SUFFIX,
    ),
    **dict.fromkeys(("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"), _EXACT),
    **dict.fromkeys(
        ("num_speculative_tokens_per_batch_size", "disable_by_batch_size"),
        "drafts take what a step has left of max_num_batched_tokens; a number by load is not there yet",
    ),
    "enforce_eager": "cuda_graphs=off is for the whole engine",
}


class SpeculativeConfig(Frozen):
    """Speculative decoding: what proposes draft tokens, and how many. Tokens are the same with any of it."""

    method: Annotated[str, OneOf(PROPOSERS)] = Field(
        description="What proposes: `ngram` (also written ngram_gpu): what followed the newest tokens where they stood "
        "before in the request.",
    )
    num_speculative_tokens: int = Field(ge=1, le=32, description="Draft tokens of a request in a step.")
    prompt_lookup_max: int = Field(
        DEFAULT_LOOKUP,
        ge=1,
        le=64,
        description="The most newest tokens that ngram looks for; the longest match counts. prompt_lookup_min when "
        "only that is given.",
    )
    prompt_lookup_min: int = Field(
        DEFAULT_LOOKUP,
        ge=1,
        le=64,
        description="The fewest of them; prompt_lookup_max when only that is given.",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_vllm_writes_it(cls, values: Any) -> Any:
        """Null means not given. What vLLM knows and we do not is refused by name."""
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        if instead := METHODS.get(str(given.get("method"))):
            raise ValueError(f"method={given['method']!r}: {instead}")
        for name in given.keys() & KEYS.keys():
            raise ValueError(f"{name}: a key of vLLM; {KEYS[name]}")
        for name in given.keys() - cls.model_fields.keys():
            raise ValueError(f"{name}: no such key; {suggestion(str(name), cls.model_fields)}")
        lookup = {"prompt_lookup_max", "prompt_lookup_min"}
        if len(ends := given.keys() & lookup) == 1:
            given |= dict.fromkeys(lookup, given[min(ends)])
        return given

    @field_validator("method", mode="before")
    @classmethod
    def _one_meaning(cls, method: Any) -> Any:
        """Two of vLLM's names; ours works on the device."""
        return "ngram" if method == "ngram_gpu" else method

    @model_validator(mode="after")
    def _check_lookup(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )
        return self
