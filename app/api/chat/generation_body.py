"""The fields that every body that asks for text has. It inherits SamplingParams, where sampling parameters are
declared.

What becomes of fields that it does not have: app/api/http/strict_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api.chat.beam_fields import ONLY_WITH_BEAMS, check_beam_fields
from app.api.chat.response_format import ResponseFormat
from app.api.generation.placement import PlacementFields
from app.api.http.strict_models import StrictModel, sort_fields
from app.beams.search import EarlyStopping
from app.bounds import Count
from app.errors import InvalidRequestError, UnsupportedError
from app.records.sampling_params import SamplingParams


class StreamOptions(StrictModel):
    """Says what a stream reports besides text."""

    include_usage: bool = Field(False, description="A last chunk with the usage of the whole request.")
    continuous_usage_stats: bool = Field(False, description="Usage so far in every chunk.")
    include_obfuscation: bool = Field(False, description="Padding against traffic analysis: only false.")

    @field_validator("include_obfuscation")
    @classmethod
    def _no_obfuscation(cls, value: bool) -> bool:
        if value:
            raise PydanticCustomError("unsupported", "include_obfuscation is not supported")
        return value


REFUSED_EVERYWHERE = {
    **{f"guided_{kind}": f"removed; use structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")},
    "guided_decoding_backend": "there is one backend",
    "guided_whitespace_pattern": "removed; use structured_outputs.whitespace_pattern",
    "kv_transfer_params": "KV transfer is not supported yet",
    "ec_transfer_params": "there is no encoder cache to transfer",
    "media_io_kwargs": "pictures are decoded in one way",
    "mm_processor_kwargs": "an option of the server; of a picture there is detail",
    "return_prompt_text": "not supported; see echo and return_token_ids",
    "return_token_offsets": "not supported; see logprobs.text_offset of /v1/completions",
    "vllm_xargs": "plugins take nothing from requests",
    "watermarking": "not supported",
}

IGNORED_EVERYWHERE = {
    "client_metadata": "what a program says of itself",
    "safety_identifier": "it names a user at OpenAI",
    "user": "it names a user at OpenAI",
}


class GenerationBody(PlacementFields, SamplingParams):
    """Holds the fields that both ways of asking for text share, beyond SamplingParams."""

    refused: ClassVar[Mapping[str, str]] = REFUSED_EVERYWHERE
    ignored: ClassVar[Mapping[str, str]] = IGNORED_EVERYWHERE

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    stream: bool = Field(False, description="Answer as server-sent events while tokens come.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    stream_interval: int = Field(1, ge=1, le=1024, description="Tokens of a choice that one chunk gathers.")
    truncate_prompt_tokens: Count | None = Field(
        None, ge=-1, description="Keep only the last so many prompt tokens; -1: as many as the context holds."
    )
    truncation_side: Literal["left", "right"] = Field(
        "left", description="Where truncate_prompt_tokens cuts: what comes first goes, or what comes last."
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Logprobs call tokens token_id:N, so that no two have one name."
    )
    spaces_between_special_tokens: Literal[True] = Field(True, description="Only true, which is as they are.")
    session_id: str | None = Field(
        None, min_length=1, description="Names the session, for routing policies that keep one on a replica."
    )
    return_token_ids: bool = Field(False, description="Add token_ids to each choice and prompt_token_ids.")
    request_id: str | None = Field(None, description="Echoed as x-request-id.", pattern=r"^[\x21-\x7e]{1,256}$")

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, json_schema or structural_tag; excludes structured_outputs."
    )
    use_beam_search: bool = Field(
        False, description="The n best beams of a search instead of samples; not with stream or what would sample."
    )
    length_penalty: float = Field(
        1.0, ge=-10.0, le=10.0, description="Beams are ranked by logprob / tokens ** this; above 0 favours long ones."
    )
    early_stopping: EarlyStopping = Field(
        False,
        description="Beams: true ends once enough have finished, false when no other looks better at its present "
        'length, "never" when none can become better.',
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any, info: ValidationInfo) -> Any:
        """Null means not given, as SDKs send it."""
        return sort_fields(cls, data, info)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream=true", param="stream_options")
        if self.stream_interval > 1 and not self.stream:
            raise InvalidRequestError("is only allowed with stream=true", param="stream_interval")
        if "truncation_side" in self.model_fields_set and self.truncate_prompt_tokens is None:
            raise InvalidRequestError("is only allowed with truncate_prompt_tokens", param="truncation_side")
        if self.return_tokens_as_token_ids and (self.logprobs is None or self.logprobs is False):
            raise InvalidRequestError("is only allowed with logprobs", param="return_tokens_as_token_ids")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("must be -1 or at least 1", param="truncate_prompt_tokens")
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedError("prompt_logprobs is not available with stream=true", param="prompt_logprobs")
        if self.response_format is not None and self.structured_outputs is not None:
            raise InvalidRequestError("excludes structured_outputs", param="response_format")
        if self.use_beam_search or not self.model_fields_set.isdisjoint(ONLY_WITH_BEAMS):
            check_beam_fields(self)
        return self

    @property
    def beam_width(self) -> int | None:
        """Beams of a search; None without one."""
        return self.n if self.use_beam_search else None

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk of a stream carries the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of SamplingParams, by name; dialects that mean something else by one translate it here."""
        fields = {name: getattr(self, name) for name in SamplingParams.model_fields}
        if self.response_format is not None:
            fields["structured_outputs"] = self.response_format.structured_outputs()
        return fields

    def field_names(self) -> dict[str, str]:
        """Maps a field of SamplingParams, or the prompt, to its name in this dialect, where that differs."""
        return {} if self.response_format is None else {"structured_outputs": "response_format"}
