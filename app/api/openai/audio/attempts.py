"""One piece of a sound becomes text: asked of the engine, judged, and asked again at a higher temperature.

The judgement is Whisper's (Radford et al., 2022, section 4.5): text that repeats itself compresses too well, and tokens
that are too unlikely are guessed; where the model says that nobody speaks and does not trust its own text, there is
none.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from app.api.engine_client import EngineClient, PromptPlace, RouteInfo
from app.api.generation.events import Choice, close_outputs
from app.api.generation.request_builder import RequestBuilder
from app.errors import EngineDeadError
from app.records.alignment_ask import AlignmentAsk
from app.records.encoder_input import EncoderInput
from app.records.outputs import CompletionOutput
from app.records.request import Placement
from app.records.sampling_params import MAX_SEED, SamplingParams
from app.records.speech_info import SpeechInfo
from app.records.step import Float32Array
from app.text.model_speech import ModelSpeech
from app.text.output_processor import OutputProcessor, TextDelta
from app.text.served_model import ServedModel

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # as Whisper's own program tries them
MAX_COMPRESSION = 2.4
MIN_LOGPROB = -1.0
MAX_NO_SPEECH = 0.6
NAMES: Mapping[str, str] = {"prompt": "prompt"}


@dataclass(slots=True, frozen=True)
class Ask:
    """Says what a request wants of each piece."""

    model: ServedModel
    speech: ModelSpeech
    task: str
    placement: Placement
    request_id: str
    previous: tuple[int, ...] = ()  # tokens of the text that goes before
    is_timed: bool = False
    temperatures: tuple[float, ...] = TEMPERATURES
    seed: int | None = None
    wants_no_speech: bool = False
    has_words: bool = False  # their times are wanted


@dataclass(slots=True)
class Attempt:
    """Holds what the engine made of a piece at one temperature."""

    output: CompletionOutput
    text: str  # without times; what was sent, where a client has it already
    temperature: float
    num_prompt_tokens: int
    no_speech: float | None = None  # the probability that nobody speaks; None: it was not asked for

    @property
    def mean_logprob(self) -> float:
        """Mean logprob of its tokens, the end among them."""
        logprobs = [entry.logprobs[0] for entry in self.output.logprobs or ()]
        return sum(logprobs) / max(1, len(logprobs))

    @property
    def compression(self) -> float:
        """Bytes of its text by those of the text compressed."""
        text = self.text.encode("utf-8", "replace")
        return len(text) / len(zlib.compress(text)) if text else 0.0

    @property
    def is_doubtful(self) -> bool:
        """True if the model hardly believes its own words."""
        return self.mean_logprob < MIN_LOGPROB

    @property
    def is_silence(self) -> bool:
        """True if nobody speaks."""
        return self.is_doubtful and self.no_speech is not None and self.no_speech > MAX_NO_SPEECH

    @property
    def should_be_repeated(self) -> bool:
        """True if a higher temperature may do better."""
        return not self.is_silence and (self.is_doubtful or self.compression > MAX_COMPRESSION)


@dataclass(slots=True, frozen=True)
class Detected:
    """Says what the model hears before the first word."""

    language: str | None  # a code; None for a model of one language
    no_speech: float


@dataclass(slots=True)
class PieceRequests:
    """The requests about one piece, which all go to the replica that has heard it."""

    client: EngineClient
    ask: Ask
    index: int  # of the piece
    heard: EncoderInput
    place: PromptPlace = field(default_factory=PromptPlace)
    num_asked: int = 0

    async def detect(self) -> Detected:
        """Ask for one token behind the first, and take the most likely language instead."""
        info = self.ask.speech.info
        codes = {token: code for code, token in info.languages.items()}
        wanted = [*codes, *(() if info.no_speech is None else (info.no_speech,))]
        if not wanted:
            return Detected(None, 0.0)
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, logprob_token_ids=wanted)
        choice = self._choice([info.start], params)
        output = CompletionOutput(0)
        async for delta in self.deltas(choice):
            delta.add_to(output)
        if not output.logprobs:
            raise EngineDeadError("the engine gave no logprobs of languages")
        entry = output.logprobs[0]
        logprobs = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        language = max(codes, key=lambda token: logprobs.get(token, -math.inf)) if codes else None
        silence = -math.inf if info.no_speech is None else logprobs.get(info.no_speech, -math.inf)
        return Detected(None if language is None else codes[language], math.exp(min(0.0, silence)))

    def choice(self, language: str | None, temperature: float) -> Choice:
        """The request for the piece's text."""
        ask = self.ask
        info, prompt = self._info, self._prompt(language)
        seed = None if ask.seed is None else (ask.seed + self.index) & MAX_SEED
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max(1, info.max_tokens - len(prompt)),
            logprobs=1,
            seed=seed,
            skip_special_tokens=True,
        )
        return self._choice(prompt, params, info.rules(timestamps=ask.is_timed))

    async def align(self, attempt: Attempt, language: str | None, num_positions: int) -> Float32Array:
        """Ask how much each token of an attempt but the last attends to the first positions of the sound, fp32
        [tokens - 1, num_positions]: with the whole text as the prompt, so that steps which write stay as they are."""
        prompt = self._prompt(language)
        known = [*prompt, *attempt.output.token_ids[:-1]]
        params = SamplingParams(temperature=0.0, max_tokens=1)
        async for delta in self.deltas(self._choice(known, params, AlignmentAsk(len(prompt), num_positions))):
            if (found := delta.output.pooled) is not None:
                return found.array()
        raise EngineDeadError("the engine did not align the words with the sound")

    @property
    def _info(self) -> SpeechInfo:
        return self.ask.speech.info.within(self.ask.model.bounds.max_total_tokens)

    def _prompt(self, language: str | None) -> list[int]:
        ask = self.ask
        return self._info.prompt(language, ask.task, timestamps=ask.is_timed, previous=ask.previous)

    def _choice(self, prompt: list[int], params: SamplingParams, *asks: object) -> Choice:
        name = f"{self.ask.request_id}-{self.index}.{self.num_asked}"
        self.num_asked += 1
        builder = RequestBuilder(self.ask.model, params, self.ask.placement, names=NAMES)
        (request,) = builder.choices(name, prompt, (self.heard, *asks))
        processor = OutputProcessor(self.ask.model.tokenizer, request.sampling, prompt)
        return Choice(self.index, self.index, request, processor)

    async def deltas(self, choice: Choice) -> AsyncIterator[TextDelta]:
        """Says as text what the engine answers to a request. Leaving it early ends the request."""
        outputs = self.client.generate(self.ask.model.name, choice.request, RouteInfo(place=self.place))
        try:
            async for output in outputs:
                delta = choice.processor.process(output)
                if delta.finish_reason == "error":
                    raise output.as_error()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            await close_outputs(outputs)
        raise EngineDeadError("the engine ended the request without a finish reason")
