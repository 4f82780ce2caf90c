"""`LLM`: the engine in this process, without Ray or HTTP, over the same EngineCore that replicas run.

It plays the ingress (I4): tokenises, renders chats, expands `n` into one engine request per choice, draws seeds,
looks for stop strings and aborts what runs past them. One thread at a time may use an LLM.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, cast

from pydantic import ValidationError
from tqdm import tqdm

from app.api.engine_client import ServedModel
from app.api.request_builder import RequestBuilder
from app.config import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.engine.models.model_check import check_model
from app.engine.outputs import CompletionOutput, EngineOutput, RequestOutput
from app.engine.sampling_params import SamplingParams
from app.engine.scheduler.request import Request
from app.engine.stats import EngineStats
from app.errors import ConfigError, InvalidRequestError
from app.offline.beam_search import BeamSearchMethods
from app.offline.pooling import PoolingMethods
from app.registry import suggestion
from app.text.chat_template import ChatTemplate
from app.text.output_processor import OutputProcessor
from app.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # where no parameters are given at all; vLLM's

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


class LLM(BeamSearchMethods, PoolingMethods):
    """A model ready to generate, or to give vectors and scores. Keywords besides `model` are options of EngineConfig.

    Raises ConfigError for a wrong option and CheckpointError for an unusable model directory.
    """

    def __init__(self, model: str = "tiny-chat", *, chat_template: str | None = None, **options: Any) -> None:
        several = options.get("tensor_parallel_size", 1) != 1 or options.get("pipeline_parallel_size", 1) != 1
        executor = "local_processes" if several else "in_process"
        self.config = _config({"model": model, "executor": executor, **options})
        info = check_model(self.config)
        directory = self.config.tokenizer or info.directory
        self.tokenizer = Tokenizer.from_directory(directory)
        self._chat_template = ChatTemplate.from_directory(directory, self.tokenizer, chat_template)
        self._core = EngineCore(self.config, info, create_executor(self.config), secrets.token_bytes(32))
        self._num_requests = 0
        self._profiling = False
        try:
            self.worker_info = self._core.start()
        except BaseException:
            self._core.shutdown()
            raise
        bounds = self._core.bounds
        self._model = ServedModel(
            *(str(model), info, self.tokenizer, self._chat_template, bounds.max_model_len, bounds.max_kv_tokens),
            pooling=bounds.pooling,
        )

    # ---- life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Free the model and its cache; idempotent."""
        self._core.shutdown()

    def stats(self) -> EngineStats:
        """What the engine measured so far."""
        return self._core.stats()

    def start_profile(self, directory: str | os.PathLike[str]) -> None:
        """Record with torch's profiler what every worker computes from now on.

        InvalidRequestError if that is being done already (without workers of their own: by any engine of this process,
        and then the same thread generates and stops it), or a worker cannot make the directory.
        """
        if self._profiling:
            raise InvalidRequestError("a profile is being recorded: stop it first")
        try:
            self._core.call_workers("start_profile", os.path.abspath(directory))
        except InvalidRequestError:
            with suppress(InvalidRequestError):
                self._core.call_workers("stop_profile")  # those that have begun
            raise
        self._profiling = True

    def stop_profile(self) -> list[str]:
        """End the recording: a trace in `directory` for each worker, to open at ui.perfetto.dev; their paths."""
        traces = self._core.call_workers("stop_profile")
        self._profiling = False
        return traces

    def default_sampling_params(self) -> SamplingParams:
        """The sampling that the model's own generation_config.json asks for."""
        return SamplingParams(**self._core.info.sampling_defaults)

    # ---- work

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}.

        `sampling_params` is one for all prompts or one for each; when not given, the model's defaults and 16 tokens, as
        with vLLM. Results are in the order of the prompts. Raises InvalidRequestError (before anything runs) naming the
        prompt at fault.
        """
        parsed = [self._parse(prompt) for prompt in _as_list(prompts)]
        return self._run([(text, ids) for text, ids in parsed], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or each of several; see `generate`."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Conversation]", [messages] if one else messages)
        prompts: list[tuple[str | None, list[int]]] = [
            self.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def render_chat(self, messages: Conversation, **options: Any) -> tuple[str, list[int]]:
        """The prompt of one conversation as text and token ids; `options` are those of ChatTemplate.render.

        Raises InvalidRequestError for messages that the template refuses.
        """
        text = self._chat_template.render([dict(message) for message in messages], **options)
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise InvalidRequestError(
                    f"a prompt has either prompt or prompt_token_ids, not {sorted(prompt)}", param="prompts"
                )
            prompt = cast("str | Sequence[int]", next(iter(prompt.values())))
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, list(prompt)

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self._params_for(len(prompts), sampling_params)
        jobs = [self._job(i, text, ids, own) for i, ((text, ids), own) in enumerate(zip(prompts, params, strict=True))]
        choices = {choice.request.request_id: choice for job in jobs for choice in job}
        for choice in choices.values():
            self._core.enqueue(choice.request)
        try:
            with _Progress(len(prompts), use_tqdm) as progress:
                while self._core.has_work():
                    self._take(self._core.step(), choices, progress)
        finally:  # after an interrupt, the next call finds an empty engine
            self._core.abort_requests(list(choices))
            while self._core.has_work() and choices:
                self._take(self._core.step(), choices, None)
        return [job[0].result for job in jobs]

    def _params_for(
        self, count: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params().model_copy(update={"max_tokens": DEFAULT_MAX_TOKENS})
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, list | tuple) or not all(
            isinstance(each, SamplingParams) for each in sampling_params
        ):
            raise InvalidRequestError(
                "sampling_params: expected SamplingParams(...), or a list with one for each prompt, not "
                f"{type(sampling_params).__name__} {str(sampling_params)[:80]}",
                param="sampling_params",
            )
        if len(sampling_params) != count:
            raise InvalidRequestError(
                f"{len(sampling_params)} sampling_params for {count} prompts", param="sampling_params"
            )
        return sampling_params

    def _job(self, index: int, text: str | None, token_ids: list[int], params: SamplingParams) -> list[_Choice]:
        """The `n` choices of one prompt, checked and ready to be enqueued."""
        self._num_requests += 1
        result = RequestOutput(str(self._num_requests - 1), text, token_ids, [], finished=False)
        try:
            choices = RequestBuilder(self._model, params).choices(result.request_id, token_ids)
            result.outputs += [CompletionOutput(choice.choice_index) for choice in choices]
            return [
                _Choice(self._core.prepare(choice), OutputProcessor(self.tokenizer, choice.sampling, token_ids), result)
                for choice in choices
            ]
        except InvalidRequestError as error:
            raise type(error)(f"prompts[{index}]: {error.message}", param=error.param) from error

    def _take(self, outputs: list[EngineOutput], choices: dict[str, _Choice], progress: _Progress | None) -> None:
        """Feed a step's outputs to their choices; what ended is taken out of `choices`."""
        for output in outputs:
            choice = choices.get(output.request_id)
            if choice is None:
                continue  # the end of a request that a stop string had ended already
            if choice.take(output):
                self._core.abort_requests([output.request_id])
            if choice.processor.finished:
                del choices[output.request_id]
                if output.error is not None:
                    logger.error("request %s failed: %s", output.request_id, output.error)
            if progress is not None:
                progress.note(choice, len(output.new_token_ids))


@dataclass(slots=True)
class _Choice:
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

    def note(self, choice: _Choice, num_new_tokens: int) -> None:
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


def _config(options: dict[str, Any]) -> EngineConfig:
    try:
        return EngineConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or None
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = f"no such option; {suggestion(str(name), EngineConfig.model_fields)}"
        raise ConfigError(f"{name or 'options'}: {reason}", param=name) from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several
