"""Parts of a message's content that are no text, in the OpenAI dialect: pictures, videos, sounds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, ClassVar, Literal, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from app.api.http.strict_models import History
from app.bounds import Text
from app.media.processors.base import Detail
from app.records.media import MediaKind

SOUND_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "mpeg", "mpga", "webm")


class ImageUrl(History):
    """A picture's address: a data URL, or one that the server may fetch."""

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(History):
    """A picture in a message's content: `image_url`, or a `file` that is one."""

    type: Literal["image_url"]
    image_url: ImageUrl
    text: ClassVar[str] = ""
    kind: ClassVar[MediaKind] = "image"
    _field: str | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _in_one_form(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("type") == "file":
            return {"type": "image_url", "image_url": _url_of_file(data.get("file"))}
        url = data.get("image_url")
        if data.get("file_id"):
            raise PydanticCustomError("unsupported", "file_id: pictures are not read from files", {})
        if isinstance(url, str):
            url = {"url": url, "detail": data.get("detail")}
        return {"type": "image_url", "image_url": url}

    @classmethod
    def of(cls, url: str, detail: str | None, field: str) -> Self:
        """A picture that a dialect calls otherwise; `field` is its place in the body that was sent."""
        part = cls.model_validate({"type": "image_url", "image_url": {"url": url, "detail": detail}})
        part._field = field
        return part

    def field(self, place: str) -> str:
        """The field of the body that it came in; `place`: of the message's part."""
        return self._field or f"{place}.image_url"

    @property
    def url(self) -> str:
        """Its address."""
        return self.image_url.url

    @property
    def detail(self) -> Detail:
        """Says how much of it is wanted."""
        return self.image_url.detail or "auto"

    def for_template(self) -> dict[str, Any]:
        """The part as chat templates expect it, which write where it goes."""
        return {"type": "image"}


class VideoUrl(History):
    """A video's address: a data URL, or one that the server may fetch."""

    url: Text


class VideoPart(History):
    """A video in a message's content: `video_url`, as at vLLM."""

    type: Literal["video_url"]
    video_url: VideoUrl
    text: ClassVar[str] = ""
    kind: ClassVar[MediaKind] = "video"
    detail: ClassVar[Detail] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _in_one_form(cls, data: Any) -> Any:
        url = data.get("video_url") if isinstance(data, dict) else None
        return {**data, "video_url": {"url": url}} if isinstance(url, str) else data

    def field(self, place: str) -> str:
        """The field of the body that it came in; `place`: of the message's part."""
        return f"{place}.video_url"

    @property
    def url(self) -> str:
        """Its address."""
        return self.video_url.url

    def for_template(self) -> dict[str, Any]:
        """The part as chat templates expect it, which write where it goes."""
        return {"type": "video"}


class AudioUrl(History):
    """A sound's address: a data URL, or one that the server may fetch."""

    url: Text


class AudioPart(History):
    """A sound in a message's content: OpenAI's `input_audio`, or `audio_url` as for pictures."""

    type: Literal["audio_url"]
    audio_url: AudioUrl
    text: ClassVar[str] = ""
    kind: ClassVar[MediaKind] = "audio"
    detail: ClassVar[Detail] = "auto"
    _field: str | None = PrivateAttr(None)
    _sent: str = PrivateAttr("audio_url")

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_form(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        is_bytes = data.get("type") == "input_audio"
        url = _url_of_sound(data.get("input_audio")) if is_bytes else data.get("audio_url")
        part = handler({"type": "audio_url", "audio_url": {"url": url} if isinstance(url, str) else url})
        part._sent = "input_audio" if is_bytes else "audio_url"
        return part

    @classmethod
    def of(cls, sound: dict[str, Any], field: str) -> Self:
        """A sound of another dialect, {data, format}; `field` is its place in the body that was sent."""
        part = cls.model_validate({"type": "input_audio", "input_audio": sound})
        part._field = field
        return part

    def field(self, place: str) -> str:
        """The field of the body that it came in; `place`: of the message's part."""
        return self._field or f"{place}.{self._sent}"

    @property
    def url(self) -> str:
        """Its address."""
        return self.audio_url.url

    def for_template(self) -> dict[str, Any]:
        """The part as chat templates expect it, which write where it goes."""
        return {"type": "audio"}


MediaPart = ImagePart | VideoPart | AudioPart


def content_of(parts: Iterable[str | MediaPart]) -> str | list[Any]:
    """A message's content from the texts and media of a dialect of blocks: texts that follow each other are lines of
    one text, whether or not something is shown before or behind them. Text alone is no list."""
    content: list[Any] = []
    for is_text, run in groupby(parts, lambda part: isinstance(part, str)):
        found = list(run)
        content += [{"type": "text", "text": "\n".join(map(str, found))}] if is_text else found
    if all(isinstance(part, dict) for part in content):  # one text, or nothing
        return "".join(part["text"] for part in content)
    return content


def _url_of_sound(sound: Any) -> str:
    """Makes a data URL of what `input_audio` holds. It refuses a format that is none."""
    given = sound if isinstance(sound, dict) else {}
    data, kind = given.get("data"), given.get("format", SOUND_FORMATS[0])
    if not isinstance(data, str):
        raise PydanticCustomError("unsupported", "input_audio: data is required, a sound in base64", {})
    if kind not in SOUND_FORMATS:
        words = {"known": ", ".join(SOUND_FORMATS)}
        raise PydanticCustomError("unsupported", "input_audio: format is one of {known}", words)
    return data if data[:5].lower() == "data:" else f"data:audio/{kind};base64,{data}"


def _url_of_file(file: Any) -> dict[str, Any]:
    given = file if isinstance(file, dict) else {}
    data = given.get("file_data")
    if not isinstance(data, str):
        raise PydanticCustomError("unsupported", "file: only file_data is read, a picture in base64", {})
    return {"url": data if data[:5].lower() == "data:" else f"data:;base64,{data}"}
