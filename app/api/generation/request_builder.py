"""From what was asked to EngineRequests: the one way, for every dialect, `LLM`, pooling and beams (I4, I6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from app.api.http.errors import in_words_of
from app.parsers.answer import load_reasoning_parser
from app.parsers.thinking import FIELD as BUDGET
from app.parsers.thinking import thinking_budget
from app.records.bad_words import BadWords
from app.records.pooling_params import PoolingParams
from app.records.request import ANYWHERE, EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from app.records.thinking_budget import ThinkingBudget
from app.structured.reasoning import ReasoningSpan
from app.text.bad_words import bad_words_token_ids
from app.text.message_marks import message_borders
from app.text.pooling_prompt import PoolingPrompt
from app.text.served_model import ServedModel
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
        self._inside = inside
        self._usual_max_tokens = usual_max_tokens
        words = self._bad_words(params) if params.bad_words else ()
        # What no single feature asks for is left out.
        asks = BadWords(words) if words else None, reasoning, model.adapter
        self._asks: tuple[object, ...] = tuple(ask for ask in asks if ask is not None)
        info = model.info
        if model.tokenizer.eos_token_id not in info.eos_token_ids:
            params = with_tokenizer_eos(params, model.tokenizer, info.eos_token_ids, info.vocab_size)
        self._params = params

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        with in_words_of(self._names):
            return bad_words_token_ids(params.bad_words, self._model.tokenizer)

    def choices(
        self, request_id: str, prompt_token_ids: list[int], media: tuple[object, ...] = ()
    ) -> list[EngineRequest]:
        """`n` requests for one prompt, with one seed. `media`: records of what it shows or lets hear."""
        with in_words_of(self._names):
            asked = EngineRequest(
                f"{request_id}-0",
                prompt_token_ids,
                self._params,
                placement=self._placement,
                asks=(*self._asks, *media),
            )
            first = self._model.bounds.settle(asked, self._usual_max_tokens)
        thinking = None if self._params.thinking_token_budget is None else self._thinking_budget(prompt_token_ids)
        borders = message_borders(prompt_token_ids, self._model.message_marks)
        asks = (*first.asks, *(ask for ask in (thinking, borders) if ask is not None))
        return [
            replace(first, request_id=f"{request_id}-{i}", choice_index=i, asks=asks) for i in range(self._params.n)
        ]

    def _thinking_budget(self, prompt_token_ids: list[int]) -> ThinkingBudget | None:
        parser, field = load_reasoning_parser(self._model), self._names.get(BUDGET, BUDGET)
        return thinking_budget(self._model.tokenizer, parser, prompt_token_ids, self._params, field, self._inside)


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
    if prompt.num_skipped and params.task == "embed":
        params = params.model_copy(update={"num_skipped": prompt.num_skipped})
    asks = prompt.asks if model.adapter is None else (*prompt.asks, model.adapter)
    token_ids = prompt.token_ids
    if model.pooling is not None and model.pooling.padding is not None and not prompt.asks:
        token, length = model.pooling.padding
        token_ids = token_ids + [token] * (length - len(token_ids))
    with in_words_of(names):
        return model.bounds.settle(EngineRequest(request_id, token_ids, params, placement=placement, asks=asks))
