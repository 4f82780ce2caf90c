"""Speculative decoding: the section `speculative_config` of an engine, with vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from app.backends import PROPOSERS, QUANT_METHODS
from app.config.frozen import Frozen
from app.registry import OneOf, suggestion
from app.telemetry.metrics import MOST_DRAFTS

DEFAULT_LOOKUP = 5  # tokens, where neither end of the lookup is given
# Methods that name a checkpoint.
WITH_MODEL = frozenset({"draft_model", "eagle", "eagle3", "dflash", "dspark", "medusa", "mlp_speculator"})
WITHOUT_MODEL = frozenset({"ngram", "suffix", "mtp"})
MOST_AUTOMATIC = 7  # drafts of a request in a step, where their number follows the cost
CHOICES = (1, 2, 3, 5, MOST_AUTOMATIC)
_SAME = {
    "ngram_gpu": "ngram",
    **dict.fromkeys(("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"),
    **dict.fromkeys(("mimo_mtp", "ernie_mtp", "exaone_moe_mtp", "hy_v3_mtp"), "mtp"),
    **dict.fromkeys(("nemotron_h_mtp", "longcat_flash_mtp"), "mtp"),
}  # vLLM's other names of a method

_LIKE_TARGET = "a drafter runs as its target does; leave it out"
_SUFFIX = "past outputs lie in one table of a fixed size on the device; leave it out"
_EXACT = "a draft is kept where it is the very token that is sampled in its place, so tokens never change; leave it out"
_COST = "the number of drafts follows what they cost; leave it out"

# What vLLM has and we have not, and what to do about it.
METHODS: Mapping[str, str] = {
    "custom_class": "a class is named by an entry point of its package (docs/plugins.md), whose name is the method",
    "extract_hidden_states": "hidden states are not given out; it drafts nothing",
}
KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len", "draft_load_config"),
            *("code_revision", "tensor_parallel_size", "use_local_argmax_reduction"),
        ),
        _LIKE_TARGET,
    ),
    **dict.fromkeys(("disable_padded_drafter_batch", "disable_eagle_block_drop"), "there is one way; leave it out"),
    **dict.fromkeys(("dspark_draft_topk", "enable_adaptive_verification"), _COST),
    "parallel_drafting": "dflash and dspark draft whole blocks, others chains; leave it out",
    "draft_sample_method": "drafts are drawn with the request's own random numbers; leave it out",
    "use_heterogeneous_vocab": "a drafter must have the target's vocabulary",
    "speculative_token_tree": "drafts are chains; leave it out",
    "index_share_for_mtp_iteration": "sparse attention is not there yet",
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
        "leave num_speculative_tokens out, and the number of drafts follows what they cost at the load",
    ),
    "enforce_eager": "cuda_graphs=off is for the whole engine",
}


class SpeculativeConfig(Frozen):
    """Speculative decoding: what proposes draft tokens, and how many. Tokens are the same with any of it."""

    method: Annotated[str, OneOf(PROPOSERS)] = Field(
        description="What proposes: `ngram` (also written ngram_gpu): what followed the newest tokens where they stood "
        "before in the request; `suffix`: there, or in past outputs of the same tenant; `draft_model`: a smaller "
        "language model; `eagle`, `eagle3`, `dflash`, `dspark`, `medusa`, `mlp_speculator`: a checkpoint trained for "
        "the target; `mtp`: a layer of the target's own checkpoint; or the name of a plugin's.",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=MOST_DRAFTS,
        description="Draft tokens of a request in a step. Not given: as many, up to 7 or none at all, as are worth "
        "their cost, by the times that steps take and by how many drafts are right.",
    )
    model: str | None = Field(
        None, description="The drafter's checkpoint: a directory, or organisation/name of a hub. Not for ngram and mtp."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub's `model`.")
    quantization: Annotated[str, OneOf(QUANT_METHODS)] | None = Field(
        None, description="How the drafter's linear layers are stored, as `quantization` of the engine."
    )
    draft_tensor_parallel_size: int | None = Field(
        None,
        ge=1,
        description="1: each rank holds the whole drafter. Not given, or the engine's: it is split as its target is.",
    )
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

    @property
    def most_drafts(self) -> int:
        """Draft tokens that a request may have in a step, whatever its drafter can propose."""
        return self.num_speculative_tokens or MOST_AUTOMATIC

    def counts(self, most: int) -> tuple[int, ...]:
        """The numbers of drafts that steps may bring a row beside none, ascending: of a drafter that can propose
        `most`, all whose cost is weighed, or the one that is given."""
        if self.num_speculative_tokens is not None:
            return (most,)
        return (*(count for count in CHOICES if count < most), most)

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
        """Several of vLLM's names; ours of n-grams works on the device."""
        return _SAME.get(method, method) if isinstance(method, str) else method

    @model_validator(mode="after")
    def _check_lookup(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )
        return self

    @model_validator(mode="after")
    def _check_model(self) -> SpeculativeConfig:
        if self.method in WITH_MODEL and self.model is None:
            raise ValueError(f"model: method={self.method} needs the drafter's checkpoint")
        of_model = ("model", "revision", "quantization", "draft_tensor_parallel_size")
        given = [name for name in of_model if getattr(self, name) is not None]
        if self.method in WITHOUT_MODEL and given:
            raise ValueError(f"{given[0]}: method={self.method} has no checkpoint of its own; leave it out")
        return self
