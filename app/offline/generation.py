"""Prompts to texts: the choices of each prompt on their way through the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tqdm import tqdm

from app.api.generation.request_builder import RequestBuilder
from app.offline.engine_loop import EngineLoop
from app.offline.prompts import Encoded, at_prompt
from app.records.adapter import AdapterAsk
from app.records.outputs import CompletionOutput, EngineOutput, RequestOutput
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams
from app.text.output_processor import OutputProcessor
from app.text.served_model import ServedModel

logger = logging.getLogger(__name__)


class Generation:
    """Completes prompts of one model."""

    def __init__(self, loop: EngineLoop, model: ServedModel) -> None:
        self._loop = loop
        self._model = model

    def run(
        self,
        prompts: Sequence[Encoded],
        params: Sequence[SamplingParams],
        adapters: Sequence[AdapterAsk | None],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Complete each prompt as its params say, with its adapter; results in the order of the prompts."""
        asked = enumerate(zip(prompts, params, adapters, strict=True))
        jobs = [self.job(i, prompt, own, adapter) for i, (prompt, own, adapter) in asked]
        choices = {choice.request.request_id: choice for job in jobs for choice in job}
        with _Progress(len(prompts), use_tqdm) as progress:

            def take(output: EngineOutput) -> None:
                choice = choices[output.request_id]
                if choice.take(output):
                    self._loop.end(output.request_id)
                if output.error is not None:
                    logger.error("request %s failed: %s", output.request_id, output.error)
                progress.note(choice, len(output.new_token_ids))

            self._loop.run([choice.request for choice in choices.values()], take)
        return [job[0].result for job in jobs]

    def job(
        self,
        index: int,
        prompt: Encoded,
        params: SamplingParams,
        adapter: AdapterAsk | None = None,
    ) -> list[Choice]:
        """The `n` choices of one prompt, checked and ready to be sent; InvalidRequestError names the prompt."""
        model = self._model if adapter is None else self._model.adapted(adapter)
        result = RequestOutput(self._loop.new_id(), prompt.text, prompt.token_ids, [], finished=False)
        with at_prompt(index):
            requests = RequestBuilder(model, params).choices(result.request_id, prompt.token_ids, prompt.asks)
            result.outputs += [CompletionOutput(request.choice_index) for request in requests]
            return [
                Choice(
                    self._loop.core.prepare(request),
                    OutputProcessor(self._model.tokenizer, request.sampling, prompt.token_ids),
                    result,
                )
                for request in requests
            ]


@dataclass(slots=True)
class Choice:
    """One engine request on its way, and where its text goes."""

    request: Request
    processor: OutputProcessor
    result: RequestOutput

    def take(self, output: EngineOutput) -> bool:
        """Add an output to the result; True when the engine has to be told that the request has ended here."""
        result = self.result
        delta = self.processor.process(output)
        delta.add_to(result.outputs[self.request.spec.choice_index])
        if delta.prompt_logprobs is not None and result.prompt_logprobs is None:
            result.prompt_logprobs = delta.prompt_logprobs
        result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
        result.finished = all(choice.finish_reason is not None for choice in result.outputs)
        return delta.must_abort


class _Progress:
    """A bar of finished prompts, with the tokens per second behind it."""

    def __init__(self, num_prompts: int, show: bool) -> None:
        self._bar = tqdm(total=num_prompts, desc="Prompts", unit="prompt", dynamic_ncols=True, disable=not show)
        self._began = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def note(self, choice: Choice, num_new_tokens: int) -> None:
        """Count a choice's new tokens, and its prompt once all its choices have ended."""
        self._num_output_tokens += num_new_tokens
        if not (choice.processor.finished and choice.result.finished):
            return
        self._num_prompt_tokens += len(choice.result.prompt_token_ids)
        elapsed_s = max(time.monotonic() - self._began, 1e-9)
        self._bar.set_postfix_str(
            f"in {self._num_prompt_tokens / elapsed_s:.0f} tok/s, out {self._num_output_tokens / elapsed_s:.0f} tok/s",
            refresh=False,
        )
        self._bar.update(1)
