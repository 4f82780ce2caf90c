"""Scores of a model that reads a query with many documents at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from app.api.engine_client import EngineClient
from app.api.http.work_pool import TOKENISE_S_PER_CHAR, work_of
from app.api.pooling.protocol import ScoredBody
from app.api.pooling.run import pool
from app.errors import UnsupportedError
from app.records.listwise import Listwise, listwise_scores
from app.records.pooling_params import PoolingParams
from app.text.listwise_prompts import ListwiseAsk, listwise_prompts
from app.text.pooling_prompt import PoolingPrompt
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel

_PASSES = 3  # over each text: cut, counted, and in its prompt


@dataclass(slots=True, frozen=True)
class Ranking:
    """Holds queries with their documents."""

    request_id: str
    pairs: Sequence[tuple[str, str]]
    field: str  # of the body, where the documents come from
    max_document_tokens: int | None = None


async def ranked(
    client: EngineClient,
    request: Request,
    body: ScoredBody,
    model: ServedModel,
    listwise: Listwise,
    asked: Ranking,
) -> tuple[list[float], list[PoolingPrompt]]:
    """A score for each pair, and the prompts that it took: one query's documents share prompts."""
    if body.truncate_prompt_tokens is not None:
        what = "a prompt of this model holds several documents; max_tokens_per_doc cuts each"
        raise UnsupportedError(what, param="truncate_prompt_tokens")
    if body.use_activation is not None:
        raise UnsupportedError("scores of this model are cosines", param="use_activation")
    pairs, places = asked.pairs, dict[str, list[int]]()
    for i, (query, _) in enumerate(pairs):
        places.setdefault(query, []).append(i)
    room = TextRoom(model.bounds.max_total_tokens, "first", field=asked.field)
    asks = [ListwiseAsk(query, [pairs[i][1] for i in own]) for query, own in places.items()]
    cost_s = _PASSES * TOKENISE_S_PER_CHAR * sum(len(first) + len(second) for first, second in pairs)
    work = work_of(request)
    made = await work.run(
        cost_s, _all_prompts, model, listwise, asks, room, body.instruction, asked.max_document_tokens
    )
    prompts = [prompt for own in made for prompt in own]
    params, names = PoolingParams(task="token_embed", use_activation=False), {"prompt": asked.field}
    results = iter(await pool(client, request, body, model, prompts, params, request_id=asked.request_id, names=names))
    found = [listwise_scores([next(results).array() for _ in own]) for own in made]
    return _in_order(places, found, len(pairs)), prompts


def _all_prompts(
    model: ServedModel,
    listwise: Listwise,
    asks: Sequence[ListwiseAsk],
    room: TextRoom,
    instruction: str | None,
    max_document_tokens: int | None,
) -> list[list[PoolingPrompt]]:
    tokenizer, most = model.tokenizer, room.num_tokens
    fitting = [
        ListwiseAsk(room.fit(tokenizer, ask.query), [room.fit(tokenizer, text) for text in ask.documents])
        for ask in asks
    ]
    return [listwise_prompts(tokenizer, listwise, ask, most, instruction, max_document_tokens) for ask in fitting]


def _in_order(places: Mapping[str, list[int]], found: Sequence[Sequence[float]], count: int) -> list[float]:
    scores = [0.0] * count
    for own, values in zip(places.values(), found, strict=True):
        for i, value in zip(own, values, strict=True):
            scores[i] = value
    return scores
