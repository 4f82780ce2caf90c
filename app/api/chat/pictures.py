"""The pictures of a conversation: fetched or unpacked, bounded before they are decoded, read beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from app.api.chat.messages import ChatMessage, ImageUrl
from app.api.http.held_bytes import Holding
from app.api.http.work_pool import PARSE_S_PER_BYTE, RequestWork
from app.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from app.media.picture import Picture
from app.media.processors.base import Processor
from app.media.reader import in_field
from app.media.source import file_of, is_fetched
from app.text.model_media import ModelMedia
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel


@dataclass(slots=True, frozen=True)
class _Shown:
    """One picture as the client sent it."""

    field: str
    data: bytes
    processor: Processor


async def read_pictures(
    work: RequestWork, model: ServedModel, messages: Sequence[ChatMessage], room: TextRoom
) -> list[Picture]:
    """The pictures of all messages, in their order. InvalidRequestError names the one that cannot be shown and why."""
    asked = [one for i, message in enumerate(messages) for one in message.pictures(f"messages.{i}")]
    if not asked:
        return []
    media = model.media
    if media is None:
        what = f"the model {model.name!r} reads text only; it takes no pictures"
        raise UnsupportedError(f"{asked[0][0]}: {what}", param=asked[0][0])
    media.check(asked[0][0])
    if len(asked) > media.max_images:
        field = asked[media.max_images][0]
        raise InvalidRequestError(f"{field}: {len(asked)} pictures; at most {media.max_images} a prompt", param=field)
    memory = _Memory(work.holding, media.reader.config.max_prompt_bytes)
    try:
        shown = [await _unpacked(work, media, memory, field, picture) for field, picture in asked]
        _check_tokens(media, shown, room)
        return await _all_read(work, media, memory, shown)
    finally:
        memory.give_files_back()


class _Memory:
    """Counts what the pictures of a prompt take: their files until all of them are read, and at most `most_pixels`
    bytes of pixels. Messages of errors go on behind the name of the field."""

    def __init__(self, holding: Holding, most_pixels: int) -> None:
        self._holding, self._most_pixels = holding, most_pixels
        self._of_files = self._of_pixels = 0

    def add_file(self, num_bytes: int) -> None:
        """So many bytes of a file; see Holding.add_picture."""
        self._holding.add_picture(num_bytes)
        self._of_files += num_bytes

    def add_pixels(self, num_bytes: int) -> None:
        """The same for pixels, which go to an engine in one message."""
        self._of_pixels += num_bytes
        if self._of_pixels > self._most_pixels:
            what = f"{self._of_pixels} bytes of pixels with the others; a prompt may have {self._most_pixels}"
            raise InvalidRequestError(f"has {what}: send fewer or smaller pictures")
        self._holding.add_picture(num_bytes)

    def give_files_back(self) -> None:
        """All of them are gone."""
        self._holding.give_back(self._of_files)


async def _unpacked(work: RequestWork, media: ModelMedia, memory: _Memory, field: str, picture: ImageUrl) -> _Shown:
    config = media.reader.config
    with in_field(field):
        if is_fetched(picture.url):
            data = await media.reader.fetch(picture.url, memory.add_file)
        else:
            cost_s = PARSE_S_PER_BYTE * len(picture.url)
            data = await work.run(cost_s, file_of, picture.url, config.max_image_bytes)
            memory.add_file(len(data))
    return _Shown(field, data, media.processor_for(picture.detail or "auto"))


def _check_tokens(media: ModelMedia, shown: Sequence[_Shown], room: TextRoom) -> None:
    """Refuses what surely does not fit before anything is decoded."""
    num_tokens = 0
    for one in shown:
        with in_field(one.field):
            num_tokens += media.reader.layout(one.data, one.processor).num_tokens
        if room.keeps == "all" and num_tokens > room.num_tokens:
            what = f"the pictures up to this one have {num_tokens} tokens; {room.what} holds {room.num_tokens}"
            raise PromptTooLongError(f"{one.field}: {what}", param=one.field)


async def _all_read(work: RequestWork, media: ModelMedia, memory: _Memory, shown: Sequence[_Shown]) -> list[Picture]:
    """The pictures, each counted as soon as it is there; where one cannot be shown, the others are given up."""
    tasks = [asyncio.ensure_future(_read(work, media, memory, one)) for one in shown]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _read(work: RequestWork, media: ModelMedia, memory: _Memory, shown: _Shown) -> Picture:
    with in_field(shown.field):
        picture = await work.run_process(media.reader.read, shown.data, media.family, shown.processor, work.tenant)
        memory.add_pixels(len(picture.pixels))
        return picture
