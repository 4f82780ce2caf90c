"""Speech of a model that chats and was trained to transcribe, too: asked by its chat template, and by what an answer
begins with. A family is a file and a line of `CHAT_SPEECH`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.media.audio.sound import Piece
from app.media.audio.sound_processor import SoundProcessor
from app.media.picture import Picture
from app.records.sampling_params import SamplingParams
from app.registry import Registry
from app.text.chat_template import ChatTemplate, RenderLimits
from app.text.model_media import ModelMedia
from app.text.placeholders import Placeholders, encode_pieces, with_media
from app.text.prompt_size import TextRoom
from app.text.speech import Asked, Speech
from app.text.tokenizer import Tokenizer

PIECE_S, LEAST_S = 30.0, 0.5  # what is shorter is heard with silence behind it
MAX_TOKENS = 448  # of a piece's text, as many as Whisper's
_RENDER = RenderLimits(max_s=2.0)
CHAT_SPEECH: Registry[type[ChatSpeech]] = Registry(
    "speech of models that chat",
    {
        "qwen3_asr": "app.text.qwen3_asr:Qwen3AsrSpeech",
        "qwen3_asr_thinker": "app.text.qwen3_asr:Qwen3AsrSpeech",
        "voxtral": "app.text.voxtral:VoxtralSpeech",
    },
)


@dataclass(frozen=True)
class ChatSpeech(Speech):
    """Holds what makes its prompts."""

    hears_in_prompt = True

    media: ModelMedia
    template: ChatTemplate
    tokenizer: Tokenizer
    end_token: int

    names: ClassVar[Mapping[str, str]]  # languages that it is told, by their codes
    between: ClassVar[Mapping[str, str]] = {"ja": "", "yue": "", "zh": "", "th": ""}  # texts of two pieces, if no space

    @classmethod
    def of(
        cls, model: ModelInfo, media: ModelMedia | None, template: ChatTemplate, tokenizer: Tokenizer
    ) -> ChatSpeech | None:
        """A model's; None: it is not known to transcribe."""
        kind = str(model.hf_config.get("model_type"))
        if kind not in CHAT_SPEECH or media is None or "audio" not in media.kinds:
            return None
        found = CHAT_SPEECH.load(kind)(media, template, tokenizer, model.eos_token_ids[0])
        return found if found.is_usable else None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reader", self.media.reader.sounds)

    @property
    def is_usable(self) -> bool:
        """False where template or tokenizer cannot make such prompts."""
        return not self.template.is_confined

    @property
    def processor(self) -> SoundProcessor:
        """Prepares a piece as a sound of a conversation."""
        found = self.media.kinds["audio"].processor
        assert isinstance(found, SoundProcessor)
        return found

    @property
    def rate(self) -> int:
        """See Speech."""
        return self.processor.rate

    @property
    def piece_s(self) -> float:
        """See Speech."""
        return min(PIECE_S, self.processor.max_s(self.media.max_item_tokens))

    @property
    def num_bytes(self) -> int:
        """See Speech."""
        settings = self.processor.heard(self.processor.layout(int(self.piece_s * self.rate)))
        return 4 * settings.num_mels * settings.num_frames

    @property
    def end(self) -> int:
        """See Speech."""
        return self.end_token

    @property
    def languages(self) -> Collection[str]:
        """See Speech."""
        return self.names.keys()

    def joint(self, language: str | None) -> str:
        """See Speech."""
        return self.between.get(language or "", " ")

    def context(self, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """See Speech: the whole prompt with one place for a sound; marks that the text spells are left out."""
        plain = [token for token in tokenizer.encode(text.strip(), False) if token not in tokenizer.special_token_ids]
        words = Placeholders(self.media)
        messages: list[Any] = [{"role": "user", "content": [{"type": "audio"}]}]
        if said := tokenizer.decode(plain, True):
            messages.insert(0, {"role": "system", "content": words.hide([{"type": "text", "text": said}])})
        rendered = self.template.render(messages, limits=_RENDER)
        return tuple(encode_pieces(tokenizer, words.pieces(rendered), False, TextRoom(1 << 20)))

    def heard(self, piece: Piece, tenant: str = "") -> Picture:
        """See Speech."""
        lacking = int(LEAST_S * self.rate) - len(piece.samples)
        samples = np.pad(piece.samples, (0, lacking)) if lacking > 0 else piece.samples
        items = self.media.kinds["audio"]
        return self.media.reader.read_piece(
            Piece(samples, piece.begin_s, piece.end_s), items.family, self.processor, tenant
        )

    def asked(
        self, heard: object, context: Sequence[int], language: str | None, task: str, most: int, *, timestamps: bool
    ) -> Asked:
        """See Speech."""
        begun = self.begin(None if language is None else self.names.get(language, language))
        return self.request(heard, context, begun, SamplingParams(max_tokens=MAX_TOKENS), most)

    def request(self, heard: object, context: Sequence[int], begun: str, params: SamplingParams, most: int) -> Asked:
        """A request whose answer has begun."""
        assert isinstance(heard, Picture)
        prompt, asks = with_media(self.media, list(context), [heard], "file")
        prompt += self.tokenizer.encode(begun, False) if begun else []
        room = max(1, min(params.max_tokens or 1, most - len(prompt)))
        return Asked(prompt, asks, params.model_copy(update={"max_tokens": room}))

    @abstractmethod
    def begin(self, language: str | None) -> str:
        """The beginning of an answer in a language (None: in whichever is spoken), behind which the text comes."""

    def is_text(self, token: int, tokenizer: Tokenizer) -> bool:
        """See Speech."""
        return token != self.end_token and token not in tokenizer.special_token_ids

    def check_words(self) -> None:
        """See Speech."""
        what = "the model tells no times of words"
        raise UnsupportedError(what, param="timestamp_granularities")

    def check_times(self) -> None:
        """See Speech."""
        raise UnsupportedError("the model tells no times; json and text are there", param="response_format")

    def check_task(self, task: str) -> None:
        """See Speech."""
        if task != "transcribe":
            raise UnsupportedError(f"the model does not {task}", param="model")

    def num_positions(self, piece: Piece) -> int:
        """See Speech; only those that tell times of words are asked."""
        raise NotImplementedError
