"""One piece of a sound becomes text: asked of the engine, judged, and asked again at a higher temperature.

The judgement is Whisper's (Radford et al., 2022, section 4.5): text that repeats itself compresses too well, and tokens
that are too unlikely are guessed; where the model says that nobody speaks and does not trust its own text, there is
none.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from app.api.engine_client import EngineClient, PromptPlace, RouteInfo
from app.api.generation.events import Choice, close_outputs
from app.api.generation.request_builder import RequestBuilder
from app.errors import EngineDeadError
from app.records.alignment_ask import AlignmentAsk
from app.records.media import MediaAsk
from app.records.outputs import CompletionOutput
from app.records.request import EngineRequest, Placement
from app.records.sampling_params import MAX_SEED, SamplingParams
from app.records.step import Float32Array
from app.text.output_processor import OutputProcessor, TextDelta
from app.text.served_model import ServedModel
from app.text.speech import Asked, Detected, Speech

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # as Whisper's own program tries them
MAX_COMPRESSION = 2.4
MIN_LOGPROB = -1.0
MAX_NO_SPEECH = 0.6
NAMES: Mapping[str, str] = {"prompt": "prompt"}


@dataclass(slots=True, frozen=True)
class Ask:
    """Says what a request wants of each piece."""

    model: ServedModel
    speech: Speech
    task: str
    placement: Placement
    request_id: str
    context: tuple[int, ...] = ()  # tokens of the request's prompt
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
    num_heard: int = 0  # of them, those that are the sound
    no_speech: float | None = None  # the probability that nobody speaks; None: it was not asked for

    @classmethod
    def of(cls, request: EngineRequest, output: CompletionOutput, text: str, temperature: float) -> Self:
        """The attempt that a request became."""
        items = [item for ask in request.asks if isinstance(ask, MediaAsk) for item in ask.items]
        return cls(output, text, temperature, len(request.prompt_token_ids), sum(item.length for item in items))

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


@dataclass(slots=True)
class PieceRequests:
    """The requests about one piece, which all go to the replica that has heard it."""

    client: EngineClient
    ask: Ask
    index: int  # of the piece
    heard: object
    place: PromptPlace = field(default_factory=PromptPlace)
    num_asked: int = 0

    async def detect(self) -> tuple[Detected, Attempt]:
        """Ask which language is spoken. Returns the attempt, too, that this is where nobody speaks."""
        speech = self.ask.speech
        asked = speech.detection(self.heard, self.ask.context)
        if asked is None:
            return Detected(None, 0.0), Attempt(CompletionOutput(0), "", 0.0, 0)
        output = CompletionOutput(0)
        choice = self._choice(asked.prompt, asked.params, *asked.asks)
        async for delta in self.deltas(choice):
            delta.add_to(output)
        return speech.detected(output, self.ask.model.tokenizer), Attempt.of(choice.request, output, "", 0.0)

    def choice(self, language: str | None, temperature: float, *, asks_silence: bool = False) -> Choice:
        """The request for the piece's text; `asks_silence`: and for what tells whether nobody speaks, if that is in a
        prompt of marks alone."""
        ask, asked = self.ask, self._asked(language)
        own = 1 if asks_silence and not ask.context else None
        seed = None if ask.seed is None else (ask.seed + self.index) & MAX_SEED
        update = {"temperature": temperature, "logprobs": 1, "seed": seed, "skip_special_tokens": True}
        update["prompt_logprobs"] = own
        return self._choice(asked.prompt, asked.params.model_copy(update=update), *asked.asks)

    async def align(self, attempt: Attempt, language: str | None, num_positions: int) -> Float32Array:
        """Ask how much each token of an attempt but the last attends to the first positions of the sound, fp32
        [tokens - 1, num_positions]: with the whole text as the prompt, so that steps which write stay as they are."""
        prompt = self._prompt(language)
        known = [*prompt, *attempt.output.token_ids[:-1]]
        params = SamplingParams(temperature=0.0, max_tokens=1)
        async for delta in self.deltas(
            self._choice(known, params, self.heard, AlignmentAsk(len(prompt), num_positions))
        ):
            if (found := delta.output.pooled) is not None:
                return found.array()
        raise EngineDeadError("the engine did not align the words with the sound")

    def _prompt(self, language: str | None) -> list[int]:
        return self._asked(language).prompt

    def _asked(self, language: str | None) -> Asked:
        ask, most = self.ask, self.ask.model.bounds.max_total_tokens
        return ask.speech.asked(self.heard, ask.context, language, ask.task, most, timestamps=ask.is_timed)

    def _choice(self, prompt: list[int], params: SamplingParams, *asks: object) -> Choice:
        name = f"{self.ask.request_id}-{self.index}.{self.num_asked}"
        self.num_asked += 1
        builder = RequestBuilder(self.ask.model, params, self.ask.placement, names=NAMES)
        (request,) = builder.choices(name, prompt, asks)
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
