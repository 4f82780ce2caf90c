"""Pictures of `LLM`'s prompts and conversations: Pillow's, arrays, files in bytes, data URLs. Nothing is fetched."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from app.errors import InvalidRequestError, UnsupportedError
from app.media.picture import Picture
from app.media.reader import in_field
from app.media.source import file_of
from app.offline.prompts import Encoded, Prompt, split_media, text_or_ids
from app.text.model_media import ModelMedia
from app.text.placeholders import Placeholders, encode_pieces, picture_alone, with_pictures
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel

_OWN_FORMS = ("image", "image_pil")  # of a part of a message, beside OpenAI's
_IN_PNG = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


class PromptEncoder:
    """Makes prompts of texts, token ids and conversations, with the pictures that they show."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def encoded(self, prompt: Prompt) -> Encoded:
        """A prompt in any of its forms; where it has pictures, it says by the model's own placeholder where they go."""
        plain, images = split_media(prompt)
        given, tokenizer = text_or_ids(plain), self._model.tokenizer
        if not images:
            return Encoded(given, tokenizer.encode(given)) if isinstance(given, str) else Encoded(None, given)
        media, pictures = self._pictures(images, "multi_modal_data")
        if media.info.is_alone:
            beside = given if isinstance(given, str) else tokenizer.decode(given)
            ids, ask = picture_alone(media, pictures, beside, "prompt")
            return Encoded(None, ids, (ask,))
        text = Placeholders(media).in_place(given) if isinstance(given, str) else None
        ids = given if isinstance(given, list) else tokenizer.encode(text or "")
        return Encoded(given if isinstance(given, str) else None, *with_pictures(media, ids, pictures, "prompt"))

    def rendered(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Encoded:
        """The prompt of a conversation; `options` are those of ChatTemplate.render."""
        chat, images = _without_images(messages)
        media, pictures = self._pictures(images, "messages") if images else (self._model.media, [])
        template, tokenizer = self._model.chat_template, self._model.tokenizer
        if media is None:
            text = template.render(chat, **options)
            return Encoded(text, tokenizer.encode(text, add_special_tokens=False))
        places = Placeholders(media)
        rendered = template.render(places.hide(chat), **{name: places.hide(value) for name, value in options.items()})
        ids = encode_pieces(tokenizer, places.pieces(rendered), False, TextRoom(self._model.max_model_len))
        return Encoded(places.shown(rendered), *with_pictures(media, ids, pictures, "messages"))

    def _pictures(self, images: Sequence[Any], field: str) -> tuple[ModelMedia, list[Picture]]:
        media = self._model.media
        if media is None:
            raise UnsupportedError(f"{field}: the model reads text only; it takes no pictures", param=field)
        media.check(field)
        if len(images) > media.max_images:
            raise InvalidRequestError(f"{field}: {len(images)} pictures; at most {media.max_images}", param=field)
        with in_field(field):
            files = [_file_of(image, media.reader.config.max_image_bytes) for image in images]
            return media, [media.reader.read(file, media.family, media.processor) for file in files]


def _without_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages as chat templates expect them, and the pictures of their parts in order."""
    chat, images = [], []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        found = [_image_in(part) for part in parts]
        images += [image for image in found if image is not None]
        shown = [part if image is None else {"type": "image"} for part, image in zip(parts, found, strict=True)]
        chat.append({**message, "content": shown} if parts else dict(message))
    return chat, images


def _image_in(part: Any) -> Any:
    """The picture in a part of a message; None: it is something else."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, Mapping) else url
    return next((part[name] for name in _OWN_FORMS if part.get(name) is not None), None)


def _file_of(image: Any, max_bytes: int) -> bytes:
    """A picture as a file; messages of errors go on behind the name of the field."""
    if isinstance(image, str):
        return file_of(image, max_bytes)
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        what = "a picture is one of Pillow's, an array of uint8 [H, W, 3], the bytes of a file or a data URL"
        raise InvalidRequestError(f"{what}, not {type(image).__name__}")
    out = io.BytesIO()
    (image if image.mode in _IN_PNG else image.convert("RGB")).save(out, "PNG", compress_level=1)
    return out.getvalue()
