"""POST /score and /rerank: how well texts go together, by a cross-encoder's score, the cosine of two embeddings, or
MaxSim of the vectors of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import check_total_chars, find_model
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import json_response
from app.api.http.work_pool import work_of
from app.api.pooling.answer import listed, meta_of, new_id, usage
from app.api.pooling.listwise import Ranking, ranked
from app.api.pooling.pictures import read_pages, read_pairs
from app.api.pooling.protocol import PoolingBody, RerankRequest, ScoredBody, ScoredText, ScoreRequest
from app.api.pooling.run import pool
from app.api.pooling.texts import pooled_room, pooling_of, prompted, tokenise, tokenise_late
from app.api.pooling.token_vectors import parts_of
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError
from app.records.late_interaction import LateInteraction
from app.records.mixed_scores import ScoreKind, TextParts, mixed_score
from app.records.pooling_params import PoolingParams
from app.records.step import Float32Array
from app.records.task_prompts import DOCUMENT, QUERY
from app.text.pair_template import PairTemplate
from app.text.pooling_prompt import PoolingPrompt
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel

PRODUCT_S = 5e-10  # of a core, for one product of two vectors' entries


def score_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The endpoints over `client`, under the paths that clients of vLLM, Jina and Cohere use."""
    router = APIRouter(tags=["pooling"])

    @router.post("/score", openapi_extra=describe_body(ScoreRequest))
    @router.post("/v1/score", openapi_extra=describe_body(ScoreRequest))
    async def score(request: Request) -> Response:
        """A score for each pair of texts."""
        body = await read_body(request, ScoreRequest)
        model = find_model(client, body.model)
        answer_id = new_id("score")
        pairs = [(ScoredText(first), ScoredText(second)) for first, second in body.pairs()]
        found, prompts = await _scores(client, limits, request, body, model, _Pairs(answer_id, pairs, body.sides()[1]))
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(found)]
        return listed(answer_id, body.model or model.name, data, prompts)

    @router.post("/rerank", openapi_extra=describe_body(RerankRequest))
    @router.post("/v1/rerank", openapi_extra=describe_body(RerankRequest))
    @router.post("/v2/rerank", openapi_extra=describe_body(RerankRequest))
    async def rerank(request: Request) -> Response:
        """The documents, best first."""
        body = await read_body(request, RerankRequest)
        model = find_model(client, body.model)
        answer_id = new_id("rerank")
        items, query = body.items(), body.asked()
        pairs = _Pairs(answer_id, [(query, item) for item in items], "documents", body.max_tokens_per_doc)
        found, prompts = await _scores(client, limits, request, body, model, pairs)
        order = sorted(range(len(items)), key=lambda i: -found[i])[: body.top_n or None]
        results: list[dict[str, Any]] = []
        for i in order:
            is_repeated = body.return_documents and (items[i].image is None or items[i].text)
            document = {"document": {"text": items[i].text}} if is_repeated else {}
            results.append({"index": i, **document, "relevance_score": found[i]})
        head = {"id": answer_id, "model": body.model or model.name, "usage": usage(prompts)}
        return json_response(head | {"results": results, "meta": meta_of({"search_units": 1})})

    return router


@dataclass(slots=True, frozen=True)
class _Pairs:
    """Holds what is to be scored: texts, or texts with pictures."""

    request_id: str
    items: Sequence[tuple[ScoredText, ScoredText]]
    field: str  # of the body, where the second ones come from
    max_last_tokens: int | None = None  # of a second text

    @property
    def pictures(self) -> list[str]:
        """The fields that hold pictures, each once."""
        return list(dict.fromkeys(one.image.field("") for pair in self.items for one in pair if one.image is not None))

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The pairs; UnsupportedError where one is a picture."""
        if pictures := self.pictures:
            raise UnsupportedError("this model compares texts; it takes no pictures", param=pictures[0])
        return [(first.text, second.text) for first, second in self.items]

    def check(self, limits: RequestLimits, instruction: str | None) -> None:
        """InvalidRequestError for too many, or too long ones, with an instruction that stands in the prompt of each."""
        if len(self.items) > limits.max_prompts:
            raise InvalidRequestError(f"{len(self.items)} pairs; at most {limits.max_prompts}", param=self.field)
        texts = {one.text for pair in self.items for one in pair}
        check_total_chars(sum(map(len, texts)), limits, self.field)
        check_total_chars(len(self.items) * len(instruction or ""), limits, "instruction")
        if self.max_last_tokens is not None and self.pictures:
            raise InvalidRequestError("a picture is not cut", param="max_tokens_per_doc")


async def _scores(
    client: EngineClient, limits: RequestLimits, request: Request, body: ScoredBody, model: ServedModel, asked: _Pairs
) -> tuple[list[float], list[PoolingPrompt]]:
    """A score for each pair, and the prompts that it took."""
    pooling, room, work = pooling_of(model), pooled_room(body, model, asked.field), work_of(request)
    asked.check(limits, body.instruction)
    if body.score_weights is not None and pooling.token_heads is None:
        raise UnsupportedError(
            "this model gives no weights and vectors of tokens beside a text's", param="score_weights"
        )
    if pooling.late is not None:
        return await _late_scores(client, limits, request, body, model, pooling.late, asked, room)
    names = {"prompt": asked.field}
    if pooling.listwise is not None:
        ranking = Ranking(asked.request_id, asked.texts, asked.field, asked.max_last_tokens)
        return await ranked(client, request, body, model, pooling.listwise, ranking)
    if pooling.labels:
        if len(pooling.labels) != 1:
            raise UnsupportedError(
                f"the model {model.name!r} has {len(pooling.labels)} classes; scores need a model of one",
                param="model",
            )
        template = _instructed(model.pair_template, body.instruction, [first.text for first, _ in asked.items])
        if asked.pictures:
            _check_count(model, asked)
            prompts = await read_pairs(work, model, template, asked.items, limits, room)
        else:
            prompts = await tokenise(work, model, asked.texts, room, asked.max_last_tokens, template)
        params = PoolingParams(task="classify", use_activation=body.use_activation)
        results = await pool(client, request, body, model, prompts, params, request_id=asked.request_id, names=names)
        return [float(result.array()[0]) for result in results], prompts
    _instructed(None, body.instruction, [])
    _refuse_activation(body)
    pairs = asked.texts
    firsts, seconds = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    query, document = pooling.prompts.first_of(QUERY), pooling.prompts.first_of(DOCUMENT)
    asking = await tokenise(work, model, [(query + text, None) for text in firsts], room)
    told = await tokenise(work, model, [(document + text, None) for text in seconds], room, asked.max_last_tokens)
    prompts = prompted(model, query, asking, room.field) + prompted(model, document, told, room.field)
    mixed = body.score_weights
    params = PoolingParams(task="embed", use_activation=not pooling.saturates)
    params = params if mixed is None else PoolingParams(task="all")
    results = await pool(client, request, body, model, prompts, params, request_id=asked.request_id, names=names)
    if mixed is not None:
        parts = [parts_of(model, prompt, result) for prompt, result in zip(prompts, results, strict=True)]
        one, two = dict(zip(firsts, parts, strict=False)), dict(zip(seconds, parts[len(firsts) :], strict=True))
        products = sum(len(one[first].vectors) * two[second].vectors.size for first, second in pairs)
        of_pairs = [(one[first], two[second]) for first, second in pairs]
        return await work.run(products * PRODUCT_S, _all_mixed_scores, mixed, of_pairs), prompts
    vectors = [result.array() for result in results]
    left = dict(zip(firsts, vectors, strict=False))
    right = dict(zip(seconds, vectors[len(firsts) :], strict=True))
    return [float(left[first] @ right[second]) for first, second in pairs], prompts


def _instructed(template: PairTemplate | None, instruction: str | None, queries: Sequence[str]) -> PairTemplate | None:
    """The template with a request's instruction; errors name it where the model, or a query with a template of its own,
    takes none."""
    if instruction is None:
        return template
    if template is None:
        raise UnsupportedError("this model is not asked in words, and takes no instruction", param="instruction")
    if any(template.holds(query) for query in queries):
        raise InvalidRequestError("a query brings the whole template with it", param="instruction")
    return template.instructed(instruction)


def _all_mixed_scores(weights: Mapping[ScoreKind, float], pairs: list[tuple[TextParts, TextParts]]) -> list[float]:
    return [mixed_score(weights, query, document) for query, document in pairs]


def _refuse_activation(body: PoolingBody) -> None:
    if body.use_activation is not None:
        raise UnsupportedError(
            "scores of an embedding model are cosines, products of sparse ones", param="use_activation"
        )


async def _late_scores(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    body: ScoredBody,
    model: ServedModel,
    late: LateInteraction,
    asked: _Pairs,
    room: TextRoom,
) -> tuple[list[float], list[PoolingPrompt]]:
    """The same of a model that compares texts, or texts and pages, vector by vector."""
    _instructed(None, body.instruction, [])
    _refuse_activation(body)
    work, before = work_of(request), pooling_of(model).prompts
    _check_pages(asked)
    _check_count(model, asked)
    firsts = list(dict.fromkeys(first.text for first, _ in asked.items))
    seconds = {_key(second): second for _, second in asked.items}
    queries = [before.first_of(QUERY) + text for text in firsts]
    documents = [before.first_of(DOCUMENT) + one.text for one in seconds.values() if one.image is None]
    prompts = await tokenise_late(work, model, late, queries, room, "query")
    texts = iter(await tokenise_late(work, model, late, documents, room, "document", asked.max_last_tokens))
    images = [one.image for one in seconds.values() if one.image is not None]
    pages = iter(await read_pages(work, model, late, images, limits, room))
    prompts += [next(texts if one.image is None else pages) for one in seconds.values()]
    _refuse_empty(asked, dict(zip(seconds, prompts[len(firsts) :], strict=True)))
    params, names = PoolingParams(task="token_embed"), {"prompt": asked.field}
    results = await pool(client, request, body, model, prompts, params, request_id=asked.request_id, names=names)
    vectors = [result.array() for result in results]
    left = dict(zip(firsts, vectors, strict=False))
    right = dict(zip(seconds, vectors[len(firsts) :], strict=True))
    pairs = [(left[first.text], right[_key(second)]) for first, second in asked.items]
    products = sum(len(query) * document.size for query, document in pairs)
    return await work.run(products * PRODUCT_S, _all_scores, late, pairs), prompts


def _key(item: ScoredText) -> tuple[str, str | None]:
    """Equal of what is computed once."""
    return item.text, None if item.image is None else item.image.url


def _check_pages(asked: _Pairs) -> None:
    """Errors name a query that is no text, and a document that is more than a page."""
    for i, (first, second) in enumerate(asked.items):
        if first.image is not None:
            raise UnsupportedError("this model's queries are texts", param=first.image.field(""))
        if second.image is not None and second.text:
            what = "a document of this model is a text or a picture, not both"
            raise InvalidRequestError(f"{asked.field}.{i}: {what}", param=f"{asked.field}.{i}")


def _check_count(model: ServedModel, asked: _Pairs) -> None:
    """InvalidRequestError names the first picture that is one too many for a request."""
    fields = asked.pictures
    most = None if model.media is None else model.media.most("image")
    if most is not None and len(fields) > most:
        what = f"{len(fields)} pictures; at most {most} a request (media.max_images, limit_mm_per_prompt)"
        raise InvalidRequestError(f"{fields[most]}: {what}", param=fields[most])


def _refuse_empty(asked: _Pairs, prompts: Mapping[tuple[str, str | None], PoolingPrompt]) -> None:
    """InvalidRequestError names the first document that has no token."""
    for i, (_, second) in enumerate(asked.items):
        if not prompts[_key(second)].token_ids:
            field = f"{asked.field}.{i}"
            raise InvalidRequestError(f"{field}: is empty; it must hold at least one token", param=field)


def _all_scores(late: LateInteraction, pairs: list[tuple[Float32Array, Float32Array]]) -> list[float]:
    return [late.score(query, document) for query, document in pairs]


ENDPOINT = Endpoint(
    lambda api: score_routes(api.client, api.limits),
    (
        ScoreRequest,
        RerankRequest,
    ),
)
