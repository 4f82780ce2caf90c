"""Pictures, videos and sounds of `LLM`'s prompts and conversations: Pillow's, arrays, files in bytes, data URLs.
Nothing is fetched."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError
from app.media.decoding import as_rgb
from app.media.picture import Picture
from app.media.processors.base import Pixels
from app.media.reader import in_field
from app.media.source import file_of
from app.offline.frames import video_of
from app.offline.prompts import Encoded, Given, Prompt, has_media, split_media, text_or_ids
from app.records.media import MediaKind
from app.text.late_prompts import picture_prompt
from app.text.model_items import NOUNS
from app.text.model_media import ModelMedia
from app.text.placeholders import Placeholders, encode_pieces, picture_alone, with_media
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel

ItemT = TypeVar("ItemT")
_OWN_FORMS = ("image", "image_pil")  # of a part of a message, beside OpenAI's
_URLS: Mapping[Any, MediaKind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
_FULL = 32_768


class PromptEncoder:
    """Makes prompts of texts, token ids and conversations, with the pictures or sounds that they bring."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def each(self, encode: Callable[[ItemT], Encoded], items: Sequence[ItemT]) -> list[Encoded]:
        """Prompts of several items in their order, pictures of several decoded side by side."""
        if self._model.media is None or len(items) < 2 or not any(map(_may_show, items)):
            return [encode(item) for item in items]
        with ThreadPoolExecutor(self._model.media.reader.config.max_decoders) as pool:
            return list(pool.map(encode, items))

    def encoded(self, prompt: Prompt) -> Encoded:
        """A prompt in any of its forms; where it has media, it says by the model's own placeholder where they go."""
        plain, found = split_media(prompt)
        given, tokenizer = text_or_ids(plain), self._model.tokenizer
        if not found:
            return Encoded(given, tokenizer.encode(given)) if isinstance(given, str) else Encoded(None, given)
        media, shown = self._shown(found, "multi_modal_data")
        beside = given if isinstance(given, str) else tokenizer.decode(given)
        if (late := None if self._model.pooling is None else self._model.pooling.late) is not None:
            return Encoded(None, *picture_prompt(tokenizer, late, media, shown, beside, "prompt"))
        if media.info.is_alone:
            ids, ask = picture_alone(media, shown, beside, "prompt")
            return Encoded(None, ids, (ask,))
        text = Placeholders(media, shown).in_place(given) if isinstance(given, str) else None
        ids = given if isinstance(given, list) else tokenizer.encode(text or "")
        return Encoded(given if isinstance(given, str) else None, *with_media(media, ids, shown, "prompt"))

    def rendered(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Encoded:
        """The prompt of a conversation; `options` are those of ChatTemplate.render."""
        chat, found = _without_media(messages)
        media, shown = self._shown(found, "messages") if found else (self._model.media, [])
        template, tokenizer = self._model.chat_template, self._model.tokenizer
        if media is None:
            text = template.render(chat, **options)
            return Encoded(text, tokenizer.encode(text, add_special_tokens=False))
        places = Placeholders(media, shown)
        options = {name: places.hide(value) for name, value in options.items()}
        rendered = template.render(places.messages(chat), **options)
        ids = encode_pieces(tokenizer, places.pieces(rendered), False, TextRoom(self._model.max_model_len))
        return Encoded(places.shown(rendered), *with_media(media, ids, shown, "messages"))

    def _shown(self, found: Sequence[Given], field: str) -> tuple[ModelMedia, list[Picture]]:
        media = self._model.media
        kinds = [one.kind for one in found]
        for kind in dict.fromkeys(kinds):
            most = None if media is None else media.most(kind)
            if media is None or most is None:
                does = "reads text only" if media is None else media.takes
                raise UnsupportedError(f"{field}: the model {does}; it takes no {NOUNS[kind]}", param=field)
            media.check(field, kind)
            if kinds.count(kind) > most:
                what = f"{kinds.count(kind)} {NOUNS[kind]}; at most {most}"
                raise InvalidRequestError(f"{field}: {what}", param=field)
        assert media is not None
        with in_field(field):
            return media, [_read(media, one) for one in found]


def _may_show(item: Any) -> bool:
    """True of a prompt with media, and of a conversation whose messages have parts."""
    if isinstance(item, str | Mapping):
        return not isinstance(item, str) and has_media(item)
    return any(isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in item)


def _read(media: ModelMedia, given: Given) -> Picture:
    config = media.reader.config
    if given.kind == "video":
        return media.read("video", video_of(given.value, config.max_video_bytes))
    is_picture = given.kind == "image"
    file = _picture(given.value, config.max_image_bytes) if is_picture else _sound_file(given.value)
    return media.read(given.kind, file)


def _without_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Given]]:
    """Messages as chat templates expect them, and the pictures, videos or sounds of their parts in order."""
    chat, media = [], []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        found = [_given_in(part) for part in parts]
        media += [one for one in found if one is not None]
        shown = [part if one is None else {"type": one.kind} for part, one in zip(parts, found, strict=True)]
        chat.append({**message, "content": shown} if parts else dict(message))
    return chat, media


def _given_in(part: Any) -> Given | None:
    """The picture, video or sound in a part of a message; None: it is something else."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind in _URLS:
        url = part.get(kind)
        return Given(_URLS[kind], url.get("url") if isinstance(url, Mapping) else url)
    if kind == "input_audio":
        sound = part.get(kind)
        data = sound.get("data") if isinstance(sound, Mapping) else sound
        is_base64 = isinstance(data, str) and data[:5].lower() != "data:"
        return Given("audio", f"data:;base64,{data}" if is_base64 else data)
    if part.get("video") is not None:
        return Given("video", part["video"])
    if part.get("audio") is not None:
        return Given("audio", part["audio"])
    return next((Given("image", part[name]) for name in _OWN_FORMS if part.get(name) is not None), None)


def _picture(image: Any, max_bytes: int) -> bytes | Pixels:
    """A picture as a file, or as pixels where it is decoded already; messages of errors go on behind the name of the
    field."""
    if isinstance(image, str):
        return file_of(image, max_bytes)
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        what = "a picture is one of Pillow's, an array of uint8 [H, W, 3], the bytes of a file or a data URL"
        raise InvalidRequestError(f"{what}, not {type(image).__name__}")
    return np.asarray(as_rgb(image))


def _sound_file(sound: Any) -> bytes:
    """A sound as a file; messages of errors go on behind the name of the field."""
    if isinstance(sound, str):
        return file_of(sound, RequestLimits().max_sound_bytes, "audio")
    if isinstance(sound, bytes):
        return sound
    samples, rate = sound if isinstance(sound, tuple) and len(sound) == 2 else (None, 0)
    if not isinstance(samples, np.ndarray) or samples.ndim != 1 or samples.dtype.kind != "f" or int(rate) < 1:
        what = "a sound is a pair of samples, an array of floats [N], and their rate, the bytes of a file or a data URL"
        raise InvalidRequestError(f"{what}, not {type(sound).__name__}")
    if not np.isfinite(samples).all():
        raise InvalidRequestError("has samples that are no numbers")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes(np.clip(np.rint(samples * _FULL), -_FULL, _FULL - 1).astype("<i2").tobytes())
    return out.getvalue()
