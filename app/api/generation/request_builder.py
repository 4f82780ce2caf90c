"""From what was asked to EngineRequests: the one way, for every dialect, `LLM`, pooling and beams (I4, I6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from app.api.engine_client import ServedModel
from app.api.errors import in_words_of
from app.api.parsers.thinking import FIELD as BUDGET
from app.api.parsers.thinking import served_budget
from app.engine.pooling.params import PoolingParams
from app.engine.request import ANYWHERE, EngineRequest, Placement
from app.engine.sampling_params import SamplingParams
from app.engine.structured.reasoning import ReasoningSpan
from app.text.bad_words import bad_words_token_ids
from app.text.pooling_prompt import PoolingPrompt
from app.text.stop_tokens import with_tokenizer_eos

OWN_NAMES: Mapping[str, str] = MappingProxyType({})


class RequestBuilder:
    """Builds the requests of prompts that share their parameters.

    Text options become token ids, what was left open is settled, and everything is checked against the model.
    Errors are those of RequestBounds; `names` says what the dialect calls a field of ours, where it has a word of its
    own. Structured outputs begin after the `reasoning`, if there is any. `inside` says whether answers begin inside the
    reasoning; None: the prompt's end tells. Where the client asks for no `max_tokens`, `usual_max_tokens` bounds it.
    """

    def __init__(
        self,
        model: ServedModel,
        params: SamplingParams,
        placement: Placement = ANYWHERE,
        *,
        names: Mapping[str, str] = OWN_NAMES,
        reasoning: ReasoningSpan | None = None,
        inside: bool | None = None,
        usual_max_tokens: int | None = None,
    ) -> None:
        self._model = model
        self._placement = placement
        self._names = names
        self._reasoning = reasoning
        self._inside = inside
        self._usual_max_tokens = usual_max_tokens
        with in_words_of(names):
            self._bad_words = bad_words_token_ids(params.bad_words, model.tokenizer)
        self._params = with_tokenizer_eos(params, model.tokenizer, model.info.eos_token_ids)

    def choices(self, request_id: str, prompt_token_ids: list[int]) -> list[EngineRequest]:
        """`n` requests for one prompt, with one seed."""
        with in_words_of(self._names):
            asked = EngineRequest(
                f"{request_id}-0",
                prompt_token_ids,
                self._params,
                bad_words_token_ids=self._bad_words,
                placement=self._placement,
                reasoning=self._reasoning,
            )
            first = self._model.bounds.settled(asked, self._usual_max_tokens)
        field = self._names.get(BUDGET, BUDGET)
        thinking = served_budget(self._model, prompt_token_ids, self._params, field, self._inside)
        return [
            replace(first, request_id=f"{request_id}-{i}", choice_index=i, thinking_budget=thinking)
            for i in range(self._params.n)
        ]


def pooling_request(
    model: ServedModel,
    request_id: str,
    prompt: PoolingPrompt,
    params: PoolingParams,
    placement: Placement = ANYWHERE,
    *,
    names: Mapping[str, str] = OWN_NAMES,
) -> EngineRequest:
    """The request for one prompt's vector or scores; errors as in RequestBuilder."""
    if model.pooling is not None and model.pooling.has_token_types and prompt.second_text_at is not None:
        params = params.model_copy(update={"second_text_at": prompt.second_text_at})
    with in_words_of(names):
        return model.bounds.settled(EngineRequest(request_id, prompt.token_ids, params, placement=placement))
