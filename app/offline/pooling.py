"""Prompts to vectors and scores, for models that pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from tqdm import tqdm

from app.api.generation.request_builder import pooling_request
from app.errors import InvalidRequestError, MantaError, UnsupportedError
from app.heap import set_aside
from app.offline.engine_loop import EngineLoop
from app.offline.media import PromptEncoder
from app.offline.pooling_outputs import OutputT, PoolingRequestOutput, ScoringOutput
from app.offline.prompts import Prompt, as_list, at_prompt, has_media, text_or_ids
from app.records.late_interaction import LateInteraction
from app.records.listwise import Listwise, listwise_scores
from app.records.outputs import EngineOutput
from app.records.pooling_info import PoolingInfo
from app.records.pooling_params import PoolingParams, PoolingTask
from app.records.request import EngineRequest
from app.records.step import Float32Array
from app.records.task_prompts import DOCUMENT, QUERY
from app.text.late_prompts import late_prompts
from app.text.listwise_prompts import ListwiseAsk, listwise_prompts
from app.text.pooling_prompt import PoolingPrompt, pooling_prompts, templated_prompts, without_prompt
from app.text.served_model import ServedModel

MADE_FOR_EACH = 2  # requests for each that goes out


class Pooling:
    """Pools prompts of one model; a model that generates refuses everything."""

    def __init__(self, loop: EngineLoop, model: ServedModel, encoder: PromptEncoder) -> None:
        self._loop = loop
        self._model = model
        self._encoder = encoder

    def usual_task(self) -> PoolingTask:
        """Names what is made of a prompt where nobody says it."""
        return self._info().raw_task

    def run(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None,
        task: PoolingTask,
        use_tqdm: bool,
        truncate_prompt_tokens: int | None,
        make: Callable[[Float32Array], OutputT],
    ) -> list[PoolingRequestOutput[OutputT]]:
        """Gives what `make` makes of each prompt's result ([E], [T, E] or [classes]), in their order; `params` are
        those of `task` when not given."""
        self._info()  # a model that generates is no prompt's fault
        params = params or PoolingParams(task=task)
        if params.task != task:
            raise InvalidRequestError(f"pooling_params: task is {params.task!r}, not {task!r}", param="pooling_params")
        limit = self._limit(truncate_prompt_tokens)
        with set_aside():
            given = as_list(prompts)
            return self._run_each(self._parsed(given, limit), len(given), params, use_tqdm, make)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool,
        truncate_prompt_tokens: int | None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """A score for each pair; see LLM.score."""
        pairs, limit, labels = _pairs(data_1, data_2), self._limit(truncate_prompt_tokens), self._info().labels
        if len(labels) > 1:
            raise UnsupportedError(f"the model has {len(labels)} classes; scores need a model of one", param="model")
        if labels:
            tokenizer, template = self._model.tokenizer, self._model.pair_template
            prompts = (
                pooling_prompts(tokenizer, pairs, limit)
                if template is None
                else templated_prompts(tokenizer, template, pairs, limit)
            )
            task = PoolingParams(task="classify")
            return self._run(prompts, task, use_tqdm, lambda scores: ScoringOutput(float(scores[0])))
        if (late := self._info().late) is not None:
            return self._late_scores(late, pairs, limit, use_tqdm)
        if (listwise := self._info().listwise) is not None:
            return self._listwise_scores(listwise, pairs, limit, use_tqdm)
        before = self._info().prompts
        query, document = before.first_of(QUERY), before.first_of(DOCUMENT)
        asked = [(query + first, document + second) for first, second in pairs]
        texts = dict.fromkeys((text for text, _ in asked), query) | dict.fromkeys((text for _, text in asked), document)
        prompts = [self._read(prompt, text, limit) for text, prompt in texts.items()]
        params = PoolingParams(task="embed", use_activation=not self._info().saturates)
        vectors = self._run(prompts, params, use_tqdm, _as_it_is)
        embedded = dict(zip(texts, vectors, strict=True))
        return [_cosine(embedded[first], embedded[second]) for first, second in asked]

    def _late_scores(
        self, late: LateInteraction, pairs: list[tuple[str, str]], limit: int | None, use_tqdm: bool
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Scores of a model that compares texts vector by vector."""
        before = self._info().prompts
        queries, documents = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
        asked = [before.first_of(QUERY) + text for text in queries]
        prompts = late_prompts(self._model.tokenizer, late, asked, "query", limit)
        asked = [before.first_of(DOCUMENT) + text for text in documents]
        prompts += late_prompts(self._model.tokenizer, late, asked, "document", limit)
        vectors = self._run(prompts, PoolingParams(task="token_embed"), use_tqdm, _as_it_is)
        left = dict(zip(queries, vectors, strict=False))
        right = dict(zip(documents, vectors[len(queries) :], strict=True))
        return [_scored(left[a], right[b], late.score(left[a].outputs, right[b].outputs)) for a, b in pairs]

    def _listwise_scores(
        self, listwise: Listwise, pairs: list[tuple[str, str]], limit: int | None, use_tqdm: bool
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Scores of a model that reads a query with many documents; each has the name and tokens of the first prompt of
        its query."""
        if limit is not None:
            raise UnsupportedError("a prompt of this model holds several texts", param="truncate_prompt_tokens")
        room, params = self._loop.core.bounds.max_total_tokens, PoolingParams(task="token_embed", use_activation=False)
        places: dict[str, list[int]] = {}
        for i, (query, _) in enumerate(pairs):
            places.setdefault(query, []).append(i)
        asks = [ListwiseAsk(query, [pairs[i][1] for i in own]) for query, own in places.items()]
        made = [listwise_prompts(self._model.tokenizer, listwise, ask, room) for ask in asks]
        results = iter(self._run([prompt for own in made for prompt in own], params, use_tqdm, _as_it_is))
        found: dict[int, PoolingRequestOutput[ScoringOutput]] = {}
        for own, prompts in zip(places.values(), made, strict=True):
            parts = [next(results) for _ in prompts]
            for i, score in zip(own, listwise_scores([part.outputs for part in parts]), strict=True):
                found[i] = PoolingRequestOutput(parts[0].request_id, parts[0].prompt_token_ids, ScoringOutput(score))
        return [found[i] for i in range(len(pairs))]

    def _info(self) -> PoolingInfo:
        if self._model.pooling is None:
            raise UnsupportedError("the model generates text; runner='pooling' gives embeddings of it", param="runner")
        return self._model.pooling

    def _limit(self, truncate_prompt_tokens: int | None) -> int | None:
        most = self._loop.core.bounds.max_total_tokens
        if truncate_prompt_tokens is None:
            return None
        if truncate_prompt_tokens < -1 or truncate_prompt_tokens == 0:
            raise InvalidRequestError("must be -1 or at least 1", param="truncate_prompt_tokens")
        return most if truncate_prompt_tokens == -1 else min(most, truncate_prompt_tokens)

    def _parsed(self, prompts: Sequence[Prompt], limit: int | None) -> Iterator[PoolingPrompt]:
        for i, prompt in enumerate(prompts):
            with at_prompt(i):
                parsed = self._parse(prompt, limit)
            yield parsed

    def _parse(self, prompt: Prompt, limit: int | None) -> PoolingPrompt:
        if has_media(prompt):
            if limit is not None:
                raise UnsupportedError("a prompt with pictures or sounds is not cut", param="truncate_prompt_tokens")
            shown = self._encoder.encoded(prompt)
            return PoolingPrompt(shown.token_ids, asks=shown.asks)
        given = text_or_ids(prompt)
        if isinstance(given, str):
            text = self._info().prompts.usual + given
            if (late := self._info().late) is not None:  # as a document
                return late_prompts(self._model.tokenizer, late, [text], "document", limit)[0]
            return self._read(self._info().prompts.usual, text, limit)
        return PoolingPrompt(given[:limit])

    def _read(self, prompt: str, text: str, limit: int | None) -> PoolingPrompt:
        """A text that begins with a prompt, of which the model may skip the tokens."""
        made = pooling_prompts(self._model.tokenizer, [(text, None)], limit)
        if not self._info().skips_prompt:
            return made[0]
        return without_prompt(self._model.tokenizer, prompt, made, "prompts")[0]

    def _run(
        self,
        prompts: list[PoolingPrompt],
        params: PoolingParams,
        use_tqdm: bool,
        make: Callable[[Float32Array], OutputT],
    ) -> list[PoolingRequestOutput[OutputT]]:
        return self._run_each(iter(prompts), len(prompts), params, use_tqdm, make)

    def _run_each(
        self,
        prompts: Iterator[PoolingPrompt],
        count: int,
        params: PoolingParams,
        use_tqdm: bool,
        make: Callable[[Float32Array], OutputT],
    ) -> list[PoolingRequestOutput[OutputT]]:
        """Prompts are taken and checked, and results converted, while the device computes others."""
        asked: dict[str, PoolingPrompt] = {}
        found: dict[str, PoolingRequestOutput[OutputT]] = {}

        def requests() -> Iterator[EngineRequest]:
            for i, prompt in enumerate(prompts):
                name = self._loop.new_id()
                with at_prompt(i):
                    request = pooling_request(self._model, name, prompt, params)
                asked[name] = prompt
                yield request

        with tqdm(total=count, desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:

            def take(output: EngineOutput) -> None:
                name = output.request_id
                if output.pooled is None:
                    raise MantaError(f"request {name} failed: {output.error or output.finish_reason}")
                prompt = asked[name]
                made = make(prompt.counted(output.pooled.array()))
                found[name] = PoolingRequestOutput(name, prompt.token_ids, made)
                bar.update(1)

            self._loop.run(map(self._loop.core.prepare, _ahead(requests())), take, in_pieces=True)
        return [found[name] for name in asked]


def _ahead(requests: Iterator[EngineRequest]) -> Iterator[EngineRequest]:
    """The same. For each that goes out one more is made, which checks it: so one at fault is found halfway to its turn,
    and until then requests are made while the device computes others."""
    ready: deque[EngineRequest] = deque()
    while True:
        ready.extend(islice(requests, MADE_FOR_EACH))
        if not ready:
            return
        yield ready.popleft()


def _as_it_is(array: Float32Array) -> Float32Array:
    return array


def _cosine(
    left: PoolingRequestOutput[Float32Array], right: PoolingRequestOutput[Float32Array]
) -> PoolingRequestOutput[ScoringOutput]:
    """The score of two embeddings, with the tokens of both."""
    return _scored(left, right, float(left.outputs @ right.outputs))


def _scored(
    left: PoolingRequestOutput[Float32Array], right: PoolingRequestOutput[Float32Array], score: float
) -> PoolingRequestOutput[ScoringOutput]:
    tokens = left.prompt_token_ids + right.prompt_token_ids
    return PoolingRequestOutput(left.request_id, tokens, ScoringOutput(score))


def _pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    left, right = ([side] if isinstance(side, str) else list(side) for side in (data_1, data_2))
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right) or not right:
        raise InvalidRequestError(f"{len(left)} texts in data_1, {len(right)} in data_2", param="data_2")
    return list(zip(left, right, strict=True))
