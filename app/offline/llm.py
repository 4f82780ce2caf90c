"""`LLM`: the engine in this process, without Ray or HTTP, over the same EngineCore that replicas run.

It plays the ingress (I4): tokenises, renders chats, expands `n` into one engine request per choice, draws seeds,
looks for stop strings and aborts what runs past them. Generation, pooling and beam search are parts over one loop of
the engine. One thread at a time may use an LLM.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, TypeVar, cast

from pydantic import ValidationError

from app.beams.search import BeamSearchParams
from app.checkpoints.model_info import tokenizer_directory
from app.config.engine import EngineConfig
from app.config.media import MediaConfig
from app.engine import control
from app.engine.core import EngineCore
from app.engine.default_drafter import with_default_drafter
from app.engine.executor import create_executor
from app.errors import ConfigError, InvalidRequestError
from app.heap import set_aside
from app.media.reader import MediaReader
from app.models.model_check import check_model
from app.offline.beam_search import BeamSearches, BeamSearchOutput
from app.offline.engine_loop import EngineLoop
from app.offline.generation import Generation
from app.offline.loaded_adapters import LoadedAdapters
from app.offline.lora_request import LoRARequest
from app.offline.media import PromptEncoder
from app.offline.metrics import Metric, metrics_of
from app.offline.pooling import Pooling
from app.offline.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from app.offline.prompts import Encoded, Prompt, as_list, check_conversations
from app.records.outputs import RequestOutput
from app.records.pooling_params import PoolingParams
from app.records.sampling_params import SamplingParams
from app.records.stats import EngineStats
from app.registry import suggestion
from app.text.chat_template import ChatTemplate
from app.text.model_media import ModelMedia
from app.text.served_model import ServedModel
from app.text.tokenizer import Tokenizer

MOST_DECODERS = 8  # processes that decode pictures
MOST_GRAPHS = 128  # of decodes that are captured beside the start's: as many as a large model has time for
DEFAULT_MAX_TOKENS = 16  # where no parameters are given at all; vLLM's

PartT = TypeVar("PartT")
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to generate, or to give vectors and scores. Keywords besides `model` are options of EngineConfig.

    Raises ConfigError for a wrong option and CheckpointError for an unusable model directory.
    """

    def __init__(self, model: str = "tiny-chat", *, chat_template: str | None = None, **options: Any) -> None:
        several = options.get("tensor_parallel_size", 1) != 1 or options.get("pipeline_parallel_size", 1) != 1
        executor = "local_processes" if several else "in_process"
        # Ten seconds of captures pay in a server that idles; whoever asks for them gets them.
        prompts = "auto" if several else "as_used"
        given = _config({"model": model, "executor": executor, "cuda_graph_prompt_tokens": prompts, **options})
        info = check_model(given)
        self.config = with_default_drafter(given, info)
        directory = tokenizer_directory(self.config, info)
        self.tokenizer = Tokenizer.from_directory(directory)
        self._chat_template = ChatTemplate.from_directory(directory, self.tokenizer, chat_template)
        key = secrets.token_bytes(32)
        self._core = EngineCore(self.config, info, create_executor(self.config), key, given=given)
        self._reader = MediaReader(MediaConfig(max_decoders=min(MOST_DECODERS, os.cpu_count() or 1)), key)
        self._is_updating = False
        self._num_updates = 0
        try:
            self.worker_info = self._core.start()
            self._capture_more()
        except BaseException:
            self._core.shutdown()
            raise
        self.config = self._core.config
        bounds = self._core.bounds
        self._model = ServedModel(
            *(str(model), info, self.tokenizer, self._chat_template, bounds.max_model_len, bounds.max_kv_tokens),
            pooling=bounds.pooling,
            media=ModelMedia.of(info, self.tokenizer, self._reader, self.config),
        )
        self._encoder = PromptEncoder(self._model)
        loop = EngineLoop(self._core)
        self._generation = Generation(loop, self._model)
        self._adapters = LoadedAdapters(self._core)
        self._beams = BeamSearches(loop, self._model)
        self._pooling = Pooling(loop, self._model, self._encoder)

    # ---- life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Free the model and its cache; idempotent."""
        self._reader.close()
        self._core.shutdown()

    def stats(self) -> EngineStats:
        """Returns what the engine measured so far."""
        return self._core.stats()

    def get_metrics(self) -> list[Metric]:
        """Returns the figures of `stats` under vLLM's names, as its classes have them; histograms are a server's."""
        return metrics_of(self._core.stats(), self.worker_info.num_draft_tokens)

    def start_profile(self, directory: str | os.PathLike[str]) -> None:
        """Record with torch's profiler what every worker computes from now on.

        InvalidRequestError if that is being done already (without workers of their own: by any engine of this process,
        and then the same thread generates and stops it), or a worker cannot make the directory.
        """
        control.run(self._core, "start_profile", {"directory": os.path.abspath(directory)})

    def stop_profile(self) -> list[str]:
        """End the recording: a trace in `directory` for each worker, to open at ui.perfetto.dev; their paths."""
        traces: list[str] = control.run(self._core, "stop_profile", {})
        return traces

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give the memory of weights and KV cache back: the weights wait in host memory (1), or are dropped (2)."""
        control.run(self._core, "sleep", {"level": level})

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again for all, or for `weights` and `kv_cache` one after the other. After level 2 the weights
        have to come back too: `collective_rpc("reload_weights")` or `load_weights`."""
        control.run(self._core, "wake_up", {"tags": tags})
        self._capture_more()

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache, on the device and in host memory."""
        self._finish_update()
        return bool(control.run(self._core, "reset_prefix_cache", {}))

    def collective_rpc(self, method: str, kwargs: Mapping[str, Any] | None = None) -> Any:
        """A control call by its name in the table (app/engine/control); UnsupportedError lists what there is."""
        self._finish_update()
        return control.run(self._core, method, dict(kwargs or {}))

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace weights by tensors of torch's under their names in the checkpoint, each whole. Several calls are one
        update, which ends with `reset_prefix_cache` or with the next work; what is left out stays as it is.

        CheckpointError names a tensor that does not fit; the model then refuses work until all weights have come.
        """
        if not self._is_updating:
            control.run(self._core, "start_weight_update", {"mode": "abort"})
            self._is_updating = True
        try:
            for pair in weights:
                control.run(self._core, "load_weights", {"tensors": [pair]})
        except BaseException:
            self._is_updating = False
            raise

    def _finish_update(self) -> None:
        if self._is_updating:
            self._is_updating = False
            self._num_updates += 1
            control.run(self._core, "finish_weight_update", {"version": str(self._num_updates)})
            self._capture_more()

    def _capture_more(self) -> None:
        """The graphs that a server's start leaves to idle time, of which there is none here."""
        with set_aside():  # before each of them Python looks at all that may be garbage
            for _ in range(MOST_GRAPHS):
                if not self._core.use_idle_time():
                    break

    def default_sampling_params(self) -> SamplingParams:
        """The sampling that the model's own generation_config.json asks for."""
        return SamplingParams(**self._core.info.sampling_defaults)

    # ---- work of models that generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}, to which
        {"multi_modal_data": {"image": ...}} adds pictures, and {"audio": ...} sounds (files in bytes, data URLs, pairs
        of an array and its rate), one for each of the model's placeholders in the prompt.

        `sampling_params` is one for all prompts or one for each; when not given, the model's defaults and 16 tokens, as
        with vLLM. `lora_request` is the adapter (enable_lora) of all prompts, or one for each. Results are in the order
        of the prompts. Raises InvalidRequestError (before anything runs) naming the prompt at fault.
        """
        encoded = self._encoder.each(self._encoder.encoded, as_list(prompts))
        return self._generate(encoded, sampling_params, use_tqdm, lora_request)

    def _generate(
        self,
        prompts: list[Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        params, part = self._params_for(len(prompts), sampling_params), self._ready(self._generation)
        return part.run(prompts, params, self._adapters.of_prompts(lora_request, len(prompts)), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or each of several; see `generate`. Parts of messages may be
        pictures: OpenAI's `image_url` with a data URL, or {"type": "image_pil", "image_pil": one of Pillow's}; or
        sounds: `input_audio`, `audio_url`, or {"type": "audio", "audio": (samples, rate)}."""
        check_conversations(messages)
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Conversation]", [messages] if one else messages)
        rendered = partial(
            self._encoder.rendered,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = self._encoder.each(rendered, conversations)
        return self._generate(prompts, sampling_params, use_tqdm, lora_request)

    def render_chat(self, messages: Conversation, **options: Any) -> tuple[str, list[int]]:
        """The prompt of one conversation as text and token ids; `options` are those of ChatTemplate.render.

        Raises InvalidRequestError for messages that the template refuses.
        """
        prompt = self._encoder.rendered(messages, **options)
        return prompt.text or "", prompt.token_ids

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` best continuations of each prompt; prompts have the forms of `generate`.

        Raises InvalidRequestError or PromptTooLongError, before anything runs, naming the prompt at fault, and
        MantaError when the engine fails on one.
        """
        return self._ready(self._beams).run(
            self._encoder.each(self._encoder.encoded, as_list(prompts)), params, use_tqdm
        )

    # ---- work of pooling models. For all four, `truncate_prompt_tokens` cuts longer prompts at their end, -1 to what
    # the model takes; without it they are refused. InvalidRequestError names the prompt at fault, and none has a result
    # then, though others may have been computed; UnsupportedError says that the model is not one for it.

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """A vector for each prompt."""
        return self._ready(self._pooling).run(
            prompts,
            pooling_params,
            "embed",
            use_tqdm,
            truncate_prompt_tokens,
            lambda found: EmbeddingOutput(found.tolist()),
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Probabilities of the model's classes for each prompt."""
        return self._ready(self._pooling).run(
            prompts,
            pooling_params,
            "classify",
            use_tqdm,
            truncate_prompt_tokens,
            lambda found: ClassificationOutput(found.tolist()),
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Whatever `pooling_params.task` says; a vector for each token when not given, scores of a classifier."""
        task = self._pooling.usual_task() if pooling_params is None else pooling_params.task
        return self._ready(self._pooling).run(
            prompts, pooling_params, task, use_tqdm, truncate_prompt_tokens, PoolingOutput
        )

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
        return self._ready(self._pooling).score(data_1, data_2, use_tqdm, truncate_prompt_tokens)

    def _ready(self, part: PartT) -> PartT:
        """The part that does the work, over weights that are all there."""
        self._finish_update()
        return part

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


def _config(options: dict[str, Any]) -> EngineConfig:
    try:
        return EngineConfig(**{"max_step_s": 0.0, **options})  # nobody waits beside a long step
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or None
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = f"no such option; {suggestion(str(name), EngineConfig.model_fields)}"
        raise ConfigError(f"{name or 'options'}: {reason}", param=name) from error
