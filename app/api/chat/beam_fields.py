"""Checks the fields that go with `use_beam_search`. What would change nothing about a search is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.api.generation.render import check_number
from app.beams.search import BeamSearchParams
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError
from app.records.sampling_params import SamplingParams

if TYPE_CHECKING:
    from app.api.chat.generation_body import GenerationBody

ONLY_WITH_BEAMS = ("length_penalty", "early_stopping")
# A search ranks by the model's own logprobs, so all other sampling parameters, new ones too, have no place in it: they
# would sample, or change the logits.
WITH_BEAMS = frozenset(
    {
        "n", "temperature", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids",
        "include_stop_str_in_output", "skip_special_tokens", "logprobs", "prompt_logprobs",
    }
)  # fmt: skip


def check_beam_fields(body: GenerationBody) -> None:
    """InvalidRequestError or UnsupportedError for a field that does not go with the search, or not without one."""
    if not body.use_beam_search:
        for name in ONLY_WITH_BEAMS:
            if name in body.model_fields_set:
                raise InvalidRequestError("is only allowed with use_beam_search=true", param=name)
        return
    if body.stream:
        raise UnsupportedError("the best beam is known at the end: not with stream=true", param="use_beam_search")
    for name, field in SamplingParams.model_fields.items():
        if name not in WITH_BEAMS and getattr(body, name) != field.default:
            raise UnsupportedError("has no place in a beam search", param=name)
    if body.temperature not in (0.0, 1.0):
        raise UnsupportedError("a beam search ranks by the model's own logprobs: 0 or 1", param="temperature")


def beam_search_params(
    body: GenerationBody, limits: RequestLimits, searches: Sequence[SamplingParams]
) -> BeamSearchParams:
    """The search that `body` asks for, within the server's limits. `searches` are what those of its prompts came to."""
    names = body.field_names()
    if searches[0].structured_outputs is not None:  # asked for by a response format or by tools
        raise UnsupportedError("not with use_beam_search", param=names.get("structured_outputs", "structured_outputs"))
    width = body.beam_width or 1
    if width > limits.max_n:
        field = names.get("n", "n")
        raise InvalidRequestError(f"{field}={width} is more than the {limits.max_n} beams allowed", param=field)
    check_number(len(searches), width, limits, names)
    num_tokens = width * sum(params.max_tokens or 0 for params in searches)
    if num_tokens > limits.max_beam_tokens:
        field = names.get("max_tokens", "max_tokens")
        raise InvalidRequestError(
            f"{width} beams of up to {searches[0].max_tokens} tokens, for each prompt, are {num_tokens} tokens; "
            f"at most {limits.max_beam_tokens} in one request: give a smaller {field} or fewer beams",
            param=field,
        )
    return BeamSearchParams(
        beam_width=width,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping,
    )
