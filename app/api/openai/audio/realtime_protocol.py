"""Events of a realtime transcription session: those that a client sends, what they settle, and how a session is told.

There are two forms, OpenAI's of today (`session.update`) and the one before it (`transcription_session.update`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from app.api.http.strict_models import StrictModel
from app.api.openai.audio.forms import MAX_PROMPT_CHARS
from app.bounds import Items
from app.errors import InvalidRequestError, UnsupportedError

RATE = 24_000  # samples a second of what clients send
MAX_AUDIO_CHARS = 20 << 20  # of one event: 15 MiB in base64, as OpenAI takes
LOGPROBS = "item.input_audio_transcription.logprobs"
_AS_IT_COMES = "a sound is heard as it comes"
_SPEAKS_NOT = "a session transcribes, and answers nothing"
# Events of sessions that speak.
_OTHERS = ("response.", "conversation.item.", "output_audio_buffer.")


class TranscriptionSettings(StrictModel):
    """Says how speech becomes text."""

    refused: ClassVar[Mapping[str, str]] = {
        "keywords": "not supported; see prompt",
        "languages": "not supported: one language, or none",
    }
    ignored: ClassVar[Mapping[str, str]] = {"delay": "text is sent as soon as it is there"}

    model: str | None = Field(None, description="Which model; the one of the address, or the server's first.")
    language: str | None = Field(None, max_length=64, description="As in a transcription.")
    prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARS, description="As in a transcription.")


class ServerVad(StrictModel):
    """Voice activity detection: an item begins and ends by itself."""

    refused: ClassVar[Mapping[str, str]] = {"idle_timeout_ms": _SPEAKS_NOT}
    ignored: ClassVar[Mapping[str, str]] = dict.fromkeys(("create_response", "interrupt_response"), _SPEAKS_NOT)

    type: Literal["server_vad"] = Field("server_vad", description="By loudness.")
    threshold: float = Field(0.5, ge=0, le=1, description="How loud speech must be.")
    prefix_padding_ms: int = Field(300, ge=0, le=5_000, description="Sound that is kept before speech.")
    silence_duration_ms: int = Field(500, ge=20, le=10_000, description="Silence that ends it.")

    @field_validator("type", mode="before")
    @classmethod
    def _by_loudness(cls, value: Any) -> Any:
        if value == "semantic_vad":
            raise PydanticCustomError("unsupported", "semantic_vad is not supported: server_vad, or null", {})
        return value


class PcmFormat(StrictModel):
    """The form of the samples."""

    type: Literal["audio/pcm"] = Field("audio/pcm", description="Samples of 16 bits, little-endian, of one channel.")
    rate: Literal[24_000] = Field(24_000, description="Samples a second.")

    @field_validator("type", mode="before")
    @classmethod
    def _of_16_bits(cls, value: Any) -> Any:
        if value in ("audio/pcmu", "audio/pcma"):
            raise PydanticCustomError("unsupported", "G.711 is not supported: send audio/pcm", {})
        return value


class AudioInput(StrictModel):
    """Holds what is heard."""

    refused: ClassVar[Mapping[str, str]] = {"noise_reduction": _AS_IT_COMES}

    format: PcmFormat | None = Field(None, description="The form of the samples.")
    transcription: TranscriptionSettings | None = Field(None, description="null: nothing is transcribed.")
    turn_detection: ServerVad | None = Field(None, description="null: the client commits.")


class Audio(StrictModel):
    """The sound of a session."""

    refused: ClassVar[Mapping[str, str]] = {"output": _SPEAKS_NOT}

    input: AudioInput = Field(AudioInput(), description="What is heard.")


class Session(StrictModel):
    """A session that transcribes."""

    type: Literal["transcription"] = Field("transcription", description="Only transcription.")
    audio: Audio = Field(Audio(), description="Its sound.")
    include: Items[Literal["item.input_audio_transcription.logprobs"]] | None = Field(None, description="Logprobs.")


class OlderSession(StrictModel):
    """The same in the older form."""

    refused: ClassVar[Mapping[str, str]] = {"input_audio_noise_reduction": _AS_IT_COMES}
    ignored: ClassVar[Mapping[str, str]] = dict.fromkeys(("client_secret", "modalities"), "not of the session's sound")

    input_audio_format: Literal["pcm16"] = Field("pcm16", description="Samples of 16 bits.")
    input_audio_transcription: TranscriptionSettings | None = Field(None, description="null: nothing is transcribed.")
    turn_detection: ServerVad | None = Field(None, description="null: the client commits.")
    include: Items[Literal["item.input_audio_transcription.logprobs"]] | None = Field(None, description="Logprobs.")

    @field_validator("input_audio_format", mode="before")
    @classmethod
    def _of_16_bits(cls, value: Any) -> Any:
        if value in ("g711_ulaw", "g711_alaw"):
            raise PydanticCustomError("unsupported", "G.711 is not supported: send pcm16", {})
        return value


class ClientEvent(StrictModel):
    """Holds what all events of a client have."""

    event_id: str | None = Field(None, description="Repeated in an error about the event.")


class SessionUpdate(ClientEvent):
    """Changes the session; what is not given stays."""

    type: Literal["session.update"] = Field(description="Only session.update.")
    session: Session = Field(description="What changes.")


class OlderSessionUpdate(ClientEvent):
    """The same in the older form."""

    type: Literal["transcription_session.update"] = Field(description="Only transcription_session.update.")
    session: OlderSession = Field(description="What changes.")


class Append(ClientEvent):
    """Further samples."""

    type: Literal["input_audio_buffer.append"] = Field(description="Only input_audio_buffer.append.")
    audio: str = Field(max_length=MAX_AUDIO_CHARS, description="Samples, in base64.")


class Commit(ClientEvent):
    """Makes an item of what was appended."""

    type: Literal["input_audio_buffer.commit"] = Field(description="Only input_audio_buffer.commit.")


class Clear(ClientEvent):
    """Forgets what was appended."""

    type: Literal["input_audio_buffer.clear"] = Field(description="Only input_audio_buffer.clear.")


EVENTS: Mapping[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "transcription_session.update": OlderSessionUpdate,
    "input_audio_buffer.append": Append,
    "input_audio_buffer.commit": Commit,
    "input_audio_buffer.clear": Clear,
}


def event_type(event: Mapping[str, Any]) -> type[ClientEvent]:
    """The model of a client's event; InvalidRequestError where its type is none that a session takes."""
    name = event.get("type")
    found = EVENTS.get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    if isinstance(name, str) and name.startswith(_OTHERS):
        raise UnsupportedError(f"{name:.66}: {_SPEAKS_NOT}", param="type")
    raise InvalidRequestError(f"type: must be one of {', '.join(EVENTS)}", param="type")


@dataclass(slots=True, frozen=True)
class SessionSettings:
    """Says what holds for all that is heard from now on."""

    transcription: TranscriptionSettings | None = field(default_factory=TranscriptionSettings)
    vad: ServerVad | None = field(default_factory=ServerVad)
    has_logprobs: bool = False

    def after(self, update: ClientEvent, event: Mapping[str, Any]) -> SessionSettings:
        """The settings as an update changes them; `event` is the same as it came, where null means off."""
        if isinstance(update, SessionUpdate):
            given = update.session.audio.input
            own = (event["session"].get("audio") or {}).get("input") or {}
            transcription, vad, name = given.transcription, given.turn_detection, "transcription"
        else:
            assert isinstance(update, OlderSessionUpdate)
            older, own = update.session, event["session"]
            transcription, vad, name = (
                older.input_audio_transcription,
                older.turn_detection,
                "input_audio_transcription",
            )
        include = update.session.include
        changed = self if name not in own else replace(self, transcription=transcription)
        if "turn_detection" in own:
            changed = replace(changed, vad=vad)
        return changed if include is None else replace(changed, has_logprobs=LOGPROBS in include)

    def described(self, session_id: str, expires_at: int, *, is_older: bool) -> dict[str, Any]:
        """The session as its events tell it."""
        transcription = None if self.transcription is None else self.transcription.model_dump()
        vad = None if self.vad is None else self.vad.model_dump()
        include = [LOGPROBS] if self.has_logprobs else None
        own = {"id": session_id, "object": "realtime.transcription_session", "expires_at": expires_at}
        if is_older:
            heard = {"input_audio_format": "pcm16", "input_audio_transcription": transcription, "turn_detection": vad}
            return own | heard | {"include": include}
        form = {"type": "audio/pcm", "rate": RATE}
        heard = {"format": form, "transcription": transcription, "turn_detection": vad, "noise_reduction": None}
        return own | {"type": "transcription", "audio": {"input": heard}, "include": include}
