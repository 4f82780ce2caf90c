"""The pictures, videos or sounds of a conversation: fetched or unpacked, bounded before they are decoded, read beside
the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from app.api.chat.media_parts import MediaPart
from app.api.http.held_bytes import Holding
from app.api.http.work_pool import PARSE_S_PER_BYTE, RequestWork
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from app.media.picture import Picture
from app.media.processors.base import Detail
from app.media.reader import in_field
from app.media.source import file_of, is_fetched
from app.records.media import MediaKind
from app.text.model_items import NOUNS
from app.text.model_media import ModelMedia
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel

AT_ONCE = 4  # of the items of many prompts: so many files are held, and fetched, at a time


@dataclass(slots=True, frozen=True)
class _Shown:
    """One item as the client sent it."""

    field: str
    data: bytes
    kind: MediaKind
    detail: Detail


async def read_media(
    work: RequestWork,
    model: ServedModel,
    asked: Sequence[tuple[str, MediaPart]],
    limits: RequestLimits,
    room: TextRoom,
) -> list[Picture]:
    """The pictures, videos or sounds of a conversation, in their order, each with its field. InvalidRequestError names
    the one that cannot be taken and why."""
    media = _taking(model, asked)
    config = media.reader.config
    memory = _Memory(work.holding, config.max_prompt_bytes)
    most_bytes: dict[MediaKind, int] = {
        **{"image": config.max_image_bytes, "video": config.max_video_bytes, "audio": limits.max_sound_bytes}
    }
    try:
        shown = [await _unpacked(work, media, memory, most_bytes[one[1].kind], *one) for one in asked]
        _check_tokens(media, shown, room)
        return await _all_read(work, media, memory, shown, room)
    finally:
        memory.give_files_back()


async def read_apart(
    work: RequestWork,
    model: ServedModel,
    asked: Sequence[tuple[str, MediaPart]],
    limits: RequestLimits,
    room: TextRoom,
) -> list[Picture]:
    """The same of items that are each shown in a prompt of its own; a few are read side by side."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def read(one: tuple[str, MediaPart]) -> Picture:
        async with turns:
            return (await read_media(work, model, [one], limits, room))[0]

    return await _all([read(one) for one in asked])


def _taking(model: ServedModel, asked: Sequence[tuple[str, MediaPart]]) -> ModelMedia:
    """The model's media. UnsupportedError names the first part of a kind that it does not take, InvalidRequestError
    the first that is one too many."""
    media = model.media
    fields: dict[MediaKind, list[str]] = {}
    for field, part in asked:
        if media is None or media.most(part.kind) is None:
            does = "reads text only" if media is None else media.takes
            what = f"the model {model.name!r} {does}; it takes no {NOUNS[part.kind]}"
            raise UnsupportedError(f"{field}: {what}", param=field)
        fields.setdefault(part.kind, []).append(field)
    assert media is not None
    for kind, own in fields.items():
        media.check(own[0], kind)
        most = media.most(kind)
        if most is not None and len(own) > most:
            what = f"{len(own)} {NOUNS[kind]}; at most {most} a prompt"
            raise InvalidRequestError(f"{own[most]}: {what}", param=own[most])
    return media


class _Memory:
    """Counts what the media of a prompt take: their files until all of them are read, and at most `most_values` bytes
    of pixels or features. Messages of errors go on behind the name of the field."""

    def __init__(self, holding: Holding, most_values: int) -> None:
        self._holding, self._most_values = holding, most_values
        self._of_files = self._of_values = 0

    def add_file(self, num_bytes: int) -> None:
        """So many bytes of a file; see Holding.add_picture."""
        self._holding.add_picture(num_bytes)
        self._of_files += num_bytes

    def add_values(self, picture: Picture) -> None:
        """The same for pixels or features, which go to an engine in one message."""
        num_bytes = len(picture.pixels)
        self._of_values += num_bytes
        if self._of_values > self._most_values:
            values = "features" if picture.kind == "audio" else "pixels"
            what = f"{self._of_values} bytes of {values} with the others; a prompt may have {self._most_values}"
            raise InvalidRequestError(f"has {what}: send fewer or smaller {NOUNS[picture.kind]}")
        self._holding.add_picture(num_bytes)

    def give_files_back(self) -> None:
        """All of them are gone."""
        self._holding.give_back(self._of_files)


async def _unpacked(
    work: RequestWork, media: ModelMedia, memory: _Memory, most_bytes: int, field: str, part: MediaPart
) -> _Shown:
    with in_field(field):
        if is_fetched(part.url):
            data = await media.reader.fetch(part.url, memory.add_file, part.kind, most_bytes)
        else:
            cost_s = PARSE_S_PER_BYTE * len(part.url)
            data = await work.run(cost_s, file_of, part.url, most_bytes, part.kind)
            memory.add_file(len(data))
    return _Shown(field, data, part.kind, part.detail)


def _check_tokens(media: ModelMedia, shown: Sequence[_Shown], room: TextRoom) -> None:
    """Refuses what surely does not fit before anything is decoded."""
    num_tokens = 0
    for one in shown:
        with in_field(one.field):
            num_tokens += media.num_tokens(one.kind, one.data, one.detail)
        if room.keeps == "all" and num_tokens > room.num_tokens:
            what = f"the pictures up to this one have {num_tokens} tokens; {room.what} holds {room.num_tokens}"
            raise PromptTooLongError(f"{one.field}: {what}", param=one.field)


async def _all_read(
    work: RequestWork, media: ModelMedia, memory: _Memory, shown: Sequence[_Shown], room: TextRoom
) -> list[Picture]:
    """The items, each counted as soon as it is there; where one cannot be shown, the others are given up."""
    turn = asyncio.Lock()  # a request has one video decoded at a time, so that others find threads beside it
    return await _all([_read(work, media, memory, one, room, turn) for one in shown])


async def _all(reads: Sequence[Coroutine[Any, Any, Picture]]) -> list[Picture]:
    """Awaits them side by side. Where one fails, or the client leaves, the others have ended, too, and hold nothing."""
    tasks = [asyncio.ensure_future(one) for one in reads]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # at once: a thread goes on without them


async def _read(
    work: RequestWork, media: ModelMedia, memory: _Memory, shown: _Shown, room: TextRoom, turn: asyncio.Lock
) -> Picture:
    run = work.run_process if shown.kind == "image" else work.run_long_process
    with in_field(shown.field):
        async with turn if shown.kind == "video" else nullcontext():
            picture = await run(media.read, shown.kind, shown.data, shown.detail, work.tenant, room.num_tokens)
        memory.add_values(picture)
        return picture
