"""POST /score and /rerank: how well texts go together, by a cross-encoder's score, the cosine of two embeddings, or
MaxSim of the vectors of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
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
from app.api.pooling.protocol import PoolingBody, RerankRequest, ScoredBody, ScoreRequest
from app.api.pooling.run import pool, pooled_room, pooling_of, tokenise, tokenise_late
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
        names = body.sides()
        found, prompts = await _scores(client, limits, request, body, model, _Pairs(answer_id, body.pairs(), names[1]))
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
        texts = body.texts()
        pairs = _Pairs(answer_id, [(body.query, text) for text in texts], "documents", body.max_tokens_per_doc)
        found, prompts = await _scores(client, limits, request, body, model, pairs)
        order = sorted(range(len(texts)), key=lambda i: -found[i])[: body.top_n or None]
        results: list[dict[str, Any]] = []
        for i in order:
            document = {"document": {"text": texts[i]}} if body.return_documents else {}
            results.append({"index": i, **document, "relevance_score": found[i]})
        head = {"id": answer_id, "model": body.model or model.name, "usage": usage(prompts)}
        return json_response(head | {"results": results, "meta": meta_of({"search_units": 1})})

    return router


@dataclass(slots=True, frozen=True)
class _Pairs:
    """Holds the texts that are to be scored."""

    request_id: str
    texts: list[tuple[str, str]]
    field: str  # of the body, where the second texts come from
    max_last_tokens: int | None = None  # of a second text

    def check(self, limits: RequestLimits, instruction: str | None) -> None:
        """InvalidRequestError for too many, or too long ones, with an instruction that stands in the prompt of each."""
        if len(self.texts) > limits.max_prompts:
            raise InvalidRequestError(f"{len(self.texts)} pairs; at most {limits.max_prompts}", param=self.field)
        check_total_chars(sum(map(len, {text for pair in self.texts for text in pair})), limits, self.field)
        check_total_chars(len(self.texts) * len(instruction or ""), limits, "instruction")


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
    pairs, names = asked.texts, {"prompt": asked.field}
    if pooling.labels:
        if len(pooling.labels) != 1:
            raise UnsupportedError(
                f"the model {model.name!r} has {len(pooling.labels)} classes; scores need a model of one",
                param="model",
            )
        template = _instructed(model.pair_template, body.instruction, pairs)
        prompts = await tokenise(work, model, pairs, room, asked.max_last_tokens, template)
        params = PoolingParams(task="classify", use_activation=body.use_activation)
        results = await pool(client, request, body, model, prompts, params, request_id=asked.request_id, names=names)
        return [float(result.array()[0]) for result in results], prompts
    _instructed(None, body.instruction, pairs)
    if body.use_activation is not None:
        raise UnsupportedError(
            "scores of an embedding model are cosines, products of sparse ones", param="use_activation"
        )
    if pooling.late is not None:
        return await _late_scores(client, request, body, model, pooling.late, asked, room)
    firsts, seconds = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    query, document = pooling.prompts.first_of(QUERY), pooling.prompts.first_of(DOCUMENT)
    prompts = await tokenise(work, model, [(query + text, None) for text in firsts], room)
    prompts += await tokenise(work, model, [(document + text, None) for text in seconds], room, asked.max_last_tokens)
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


def _instructed(
    template: PairTemplate | None, instruction: str | None, pairs: list[tuple[str, str]]
) -> PairTemplate | None:
    """The template with a request's instruction; errors name it where the model, or a query with a template of its own,
    takes none."""
    if instruction is None:
        return template
    if template is None:
        raise UnsupportedError("this model is not asked in words, and takes no instruction", param="instruction")
    if any(template.holds(query) for query, _ in pairs):
        raise InvalidRequestError("a query brings the whole template with it", param="instruction")
    return template.instructed(instruction)


def _all_mixed_scores(weights: Mapping[ScoreKind, float], pairs: list[tuple[TextParts, TextParts]]) -> list[float]:
    return [mixed_score(weights, query, document) for query, document in pairs]


async def _late_scores(
    client: EngineClient,
    request: Request,
    body: PoolingBody,
    model: ServedModel,
    late: LateInteraction,
    asked: _Pairs,
    room: TextRoom,
) -> tuple[list[float], list[PoolingPrompt]]:
    """The same of a model that compares texts vector by vector."""
    work, before, pairs = work_of(request), pooling_of(model).prompts, asked.texts
    firsts, seconds = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    queries = [before.first_of(QUERY) + text for text in firsts]
    documents = [before.first_of(DOCUMENT) + text for text in seconds]
    prompts = await tokenise_late(work, model, late, queries, room, "query")
    prompts += await tokenise_late(work, model, late, documents, room, "document", asked.max_last_tokens)
    params, names = PoolingParams(task="token_embed"), {"prompt": asked.field}
    results = await pool(client, request, body, model, prompts, params, request_id=asked.request_id, names=names)
    vectors = [result.array() for result in results]
    left = dict(zip(firsts, vectors, strict=False))
    right = dict(zip(seconds, vectors[len(firsts) :], strict=True))
    products = sum(len(left[first]) * right[second].size for first, second in pairs)
    found = await work.run(products * PRODUCT_S, _all_scores, late, [(left[a], right[b]) for a, b in pairs])
    return found, prompts


def _all_scores(late: LateInteraction, pairs: list[tuple[Float32Array, Float32Array]]) -> list[float]:
    return [late.score(query, document) for query, document in pairs]


ENDPOINT = Endpoint(
    lambda api: score_routes(api.client, api.limits),
    (
        ScoreRequest,
        RerankRequest,
    ),
)
