"""The part of `LLM` for models that give vectors and scores instead of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tqdm import tqdm

from app.api.engine_client import ServedModel
from app.api.request_builder import pooling_request
from app.engine.core import EngineCore
from app.engine.outputs import EngineOutput
from app.engine.pooling.info import PoolingInfo
from app.engine.pooling.params import PoolingParams, PoolingTask
from app.engine.step import Float32Array
from app.errors import InvalidRequestError, MantaError, UnsupportedError
from app.offline.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from app.text.pooling_prompt import PoolingPrompt, pooling_prompts
from app.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
_EMBED = PoolingParams(task="embed")


class PoolingMethods:
    """`embed`, `score`, `classify` and `encode`. A prompt is a text, token ids, or {"prompt": text} /
    {"prompt_token_ids": ids}; results are in the order of the prompts.

    `truncate_prompt_tokens` cuts longer prompts at their end, -1 to what the model takes; without it they are refused.
    All raise InvalidRequestError, before anything runs, naming the prompt at fault, and UnsupportedError when the
    model is not one for it.
    """

    tokenizer: Tokenizer
    _core: EngineCore
    _model: ServedModel
    _num_requests: int

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """A vector for each prompt."""
        params = pooling_params or _EMBED
        found = self._pool(prompts, params, "embed", use_tqdm, truncate_prompt_tokens)
        return [PoolingRequestOutput(name, ids, EmbeddingOutput(array.tolist())) for name, ids, array in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Probabilities of the model's classes for each prompt."""
        params = pooling_params or PoolingParams(task="classify")
        found = self._pool(prompts, params, "classify", use_tqdm, truncate_prompt_tokens)
        return [PoolingRequestOutput(name, ids, ClassificationOutput(array.tolist())) for name, ids, array in found]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Whatever `pooling_params.task` says; a vector for each token when not given, scores of a classifier."""
        default = PoolingParams(task="classify" if self._pools().labels else "token_embed")
        params = pooling_params or default
        found = self._pool(prompts, params, params.task, use_tqdm, truncate_prompt_tokens)
        return [PoolingRequestOutput(name, ids, PoolingOutput(array)) for name, ids, array in found]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """A score for each pair; one `data_1` goes with every `data_2`. A classifier's of one class, or the cosine of
        two embeddings."""
        pairs = _pairs(data_1, data_2)
        limit = self._limit(truncate_prompt_tokens)
        labels = self._pools().labels
        if len(labels) > 1:
            raise UnsupportedError(f"the model has {len(labels)} classes; scores need a model of one", param="model")
        if labels:
            found = self._run_pooling(
                pooling_prompts(self.tokenizer, pairs, limit), PoolingParams(task="classify"), use_tqdm
            )
            return [PoolingRequestOutput(name, ids, ScoringOutput(float(array[0]))) for name, ids, array in found]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        params = PoolingParams(task="embed", use_activation=True)
        prompts = pooling_prompts(self.tokenizer, [(text, None) for text in texts], limit)
        embedded = dict(zip(texts, self._run_pooling(prompts, params, use_tqdm), strict=True))
        results = []
        for first, second in pairs:
            (name, ids, left), (_, more, right) = embedded[first], embedded[second]
            results.append(PoolingRequestOutput(name, ids + more, ScoringOutput(float(left @ right))))
        return results

    def _pools(self) -> PoolingInfo:
        if self._model.pooling is None:
            raise UnsupportedError("the model generates text; runner='pooling' gives embeddings of it", param="runner")
        return self._model.pooling

    def _limit(self, truncate_prompt_tokens: int | None) -> int | None:
        most = self._core.bounds.max_total_tokens
        if truncate_prompt_tokens is None:
            return None
        if truncate_prompt_tokens < -1 or truncate_prompt_tokens == 0:
            raise InvalidRequestError("must be -1 or at least 1", param="truncate_prompt_tokens")
        return most if truncate_prompt_tokens == -1 else min(most, truncate_prompt_tokens)

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams,
        task: PoolingTask,
        use_tqdm: bool,
        truncate_prompt_tokens: int | None,
    ) -> list[tuple[str, list[int], Float32Array]]:
        if params.task != task:
            raise InvalidRequestError(f"pooling_params: task is {params.task!r}, not {task!r}", param="pooling_params")
        limit = self._limit(truncate_prompt_tokens)
        several: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if several and isinstance(several[0], int):
            several = [several]
        parsed = [_parse(prompt, self.tokenizer, limit) for prompt in several]
        return self._run_pooling(parsed, params, use_tqdm)

    def _run_pooling(
        self, prompts: list[PoolingPrompt], params: PoolingParams, use_tqdm: bool
    ) -> list[tuple[str, list[int], Float32Array]]:
        """(request id, token ids, result) of each prompt."""
        names = [str(self._num_requests + i) for i in range(len(prompts))]
        self._num_requests += len(prompts)
        prepared = []
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            try:
                prepared.append(self._core.prepare(pooling_request(self._model, name, prompt, params)))
            except InvalidRequestError as error:
                raise type(error)(f"prompts[{i}]: {error.message}", param=error.param) from error
        found: dict[str, Float32Array] = {}
        for request in prepared:
            self._core.enqueue(request)
        try:
            with tqdm(total=len(prompts), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
                while self._core.has_work():
                    bar.update(_take(self._core.step(), found))
        finally:  # after an interrupt, the next call finds an empty engine
            self._core.abort_requests([name for name in names if name not in found])
            while self._core.has_work():
                _take(self._core.step(), found, check=False)
        return [(name, prompt.token_ids, found[name]) for name, prompt in zip(names, prompts, strict=True)]


def _take(outputs: list[EngineOutput], found: dict[str, Float32Array], check: bool = True) -> int:
    """Collect results; returns how many. MantaError for a request that failed, where `check`."""
    for output in outputs:
        if output.pooled is not None:
            found[output.request_id] = output.pooled.array()
        elif check:
            raise MantaError(f"request {output.request_id} failed: {output.error or output.finish_reason}")
    return len(outputs)


def _parse(prompt: Prompt, tokenizer: Tokenizer, limit: int | None) -> PoolingPrompt:
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not set(prompt) <= {"prompt", "prompt_token_ids"}:
            raise InvalidRequestError(
                f"a prompt has either prompt or prompt_token_ids, not {sorted(prompt)}", param="prompts"
            )
        prompt = cast("str | Sequence[int]", next(iter(prompt.values())))
    if isinstance(prompt, str):
        return pooling_prompts(tokenizer, [(prompt, None)], limit)[0]
    return PoolingPrompt(list(prompt)[:limit])


def _pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    left, right = ([side] if isinstance(side, str) else list(side) for side in (data_1, data_2))
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right) or not right:
        raise InvalidRequestError(f"{len(left)} texts in data_1, {len(right)} in data_2", param="data_2")
    return list(zip(left, right, strict=True))
