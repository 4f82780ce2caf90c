"""The contract of models that write down what is said: how a piece is asked about, and what they cannot tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.errors import InvalidRequestError
from app.media.audio.reader import SoundReader
from app.media.audio.sound import Piece
from app.records.outputs import CompletionOutput
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from app.text.languages import code_of
from app.text.tokenizer import Tokenizer

MAX_SHOWN = 128  # languages that an error names


@dataclass(slots=True, frozen=True)
class Asked:
    """One request about a piece."""

    prompt: list[int]
    asks: tuple[object, ...]  # records of what it lets hear, and of rules
    params: SamplingParams


@dataclass(slots=True, frozen=True)
class Detected:
    """Says what the model hears before the first word."""

    language: str | None  # a code, or a name that has none; None for a model of one language, or where none is named
    no_speech: float
    is_silent: bool = False  # nobody speaks: there is no text to ask for


class Speech(ABC):
    """One model's."""

    reader: SoundReader
    tells_silence: bool = False  # how likely it is that nobody speaks
    hears_in_prompt: bool = False  # the sound stands in its prompts, and counts as their tokens
    alignment_bytes: int = 0  # memory of what aligns the longest transcript of a piece with it
    first_timestamp: int | None = None  # the token of time 0; None: it tells no times
    timestamp_s: float = 0.0  # from one time to the next

    @property
    @abstractmethod
    def rate(self) -> int:
        """Samples a second of what it hears."""

    @property
    @abstractmethod
    def piece_s(self) -> float:
        """Seconds of sound that it hears at once."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of what the encoder reads of a piece."""

    @property
    @abstractmethod
    def end(self) -> int:
        """The token behind a text."""

    @property
    @abstractmethod
    def languages(self) -> Collection[str]:
        """Codes of the languages that it may be told; none: it knows one."""

    @abstractmethod
    def context(self, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Tokens that bring a request's `prompt` into those about all of its pieces. UnsupportedError where the model
        takes none."""

    @abstractmethod
    def heard(self, piece: Piece, tenant: str = "") -> object:
        """A piece of a tenant's as the encoder reads it. Blocks on a process; errors as those of SoundReader."""

    @abstractmethod
    def detection(self, heard: object, context: Sequence[int]) -> Asked | None:
        """Asks which language is spoken; None: there is nothing to ask."""

    @abstractmethod
    def detected(self, output: CompletionOutput, tokenizer: Tokenizer) -> Detected:
        """Reads the answer to that."""

    @abstractmethod
    def asked(
        self, heard: object, context: Sequence[int], language: str | None, task: str, most: int, *, timestamps: bool
    ) -> Asked:
        """Asks for a piece's text; prompt and text have `most` tokens together."""

    def silence(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> float | None:
        """Reads from the logprobs of a transcript's own prompt, each with the most likely token there, how likely it is
        that nobody speaks: 0 where something else is likelier. None: they do not tell."""
        return None

    @abstractmethod
    def is_text(self, token: int, tokenizer: Tokenizer) -> bool:
        """True for a token that is said, and no mark or time."""

    @abstractmethod
    def check_words(self) -> None:
        """UnsupportedError where nothing tells when words are said."""

    @abstractmethod
    def check_times(self) -> None:
        """UnsupportedError where nothing tells when anything is said."""

    @abstractmethod
    def check_task(self, task: str) -> None:
        """UnsupportedError where the model does not do it."""

    @abstractmethod
    def num_positions(self, piece: Piece) -> int:
        """Positions of the encoder's output that are the piece's own; what is behind them is silence."""

    def joint(self, language: str | None) -> str:
        """Stands between the texts of two pieces."""
        return ""

    def text(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
        """Says what a transcript says, without marks and times: the tokens of times need not be special ones."""
        return tokenizer.decode([token for token in token_ids if self.is_text(token, tokenizer)], True)

    def language(self, given: str | None) -> str | None:
        """The code of a language that a request names; None where it names none, or there is only one.

        InvalidRequestError where the model does not know it.
        """
        if given is None or not given.strip():
            return None
        code, known = code_of(given), self.languages
        if code in known:
            return code
        if not known and code == "en":
            return None
        names = ", ".join(sorted(known)[:MAX_SHOWN]) or "en"
        raise InvalidRequestError(f"the model hears no language {given!r:.66}; it knows {names}", param="language")
