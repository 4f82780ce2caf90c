"""Keeps what a chat template writes where a picture or sound goes apart from the same words in a user's text.

While a template renders a conversation, a mark that nobody can guess stands for each such word of the user's. Behind
it they come back as text: tokenised in halves, none of which is a token of its own meaning.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from app.errors import InvalidRequestError, UnsupportedError
from app.media.picture import Picture
from app.records.media import MediaAsk, MediaItem, MediaKind
from app.text.chat_template import PLACE
from app.text.model_items import NOUNS
from app.text.model_media import ModelMedia
from app.text.prompt_size import TextRoom
from app.text.tokenizer import Tokenizer


class Placeholders:
    """One conversation's."""

    def __init__(self, media: ModelMedia, shown: Sequence[Picture] = ()) -> None:
        self._words = sorted(media.reserved, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._words)))
        self._nonce = secrets.token_hex(12)
        self._has_marks = False  # most conversations have none, and nobody looks for them then
        self._media, self._shows = media, bool(shown)
        self._befores = {kind: iter([one.layout.before for one in shown if one.kind == kind]) for kind in media.kinds}

    def hide(self, value: Any) -> Any:
        """The same with marks in all texts of nested lists and objects."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._mark(found.group()), value)
        if isinstance(value, dict):
            return {self.hide(name): self.hide(own) for name, own in value.items()}
        return [self.hide(own) for own in value] if isinstance(value, list) else value

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages for a template, users' words hidden; with the text that stands for an item beside each, for one that
        writes texts alone."""
        hidden: list[dict[str, Any]] = self.hide(list(messages))
        for message in hidden if self._shows else ():
            if isinstance(content := message.get("content"), list):
                message["content"] = [self._placed(part) for part in content]
        return hidden

    def _placed(self, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        written = [items.processor.written for items in self._media.kinds.values() if items.kind == kind]
        return {**part, PLACE: written[0]} if written else part

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile(f"USERWORD{self._nonce}N([0-9]+)END")

    def _mark(self, word: str) -> str:
        self._has_marks = True
        return f"USERWORD{self._nonce}N{self._words.index(word)}END"

    def shown(self, rendered: str) -> str:
        """A rendered prompt as whoever reads it expects it: with the words of users."""
        if not self._has_marks:
            return rendered
        return self._marks.sub(lambda found: self._words[int(found.group(1))], rendered)

    def pieces(self, rendered: str) -> list[str]:
        """A rendered prompt in pieces that are tokenised one by one: cut within each word of a user's."""
        if not self._has_marks:
            return [self.in_place(rendered)]
        first, *rest = self._marks.split(rendered)
        pieces, begun = [], self.in_place(first)
        for index, text in zip(rest[::2], rest[1::2], strict=True):
            word = self._words[int(index)]
            half = len(word) // 2
            pieces.append(begun + word[:half])
            begun = word[half:] + self.in_place(text)
        return [*pieces, begun]

    def in_place(self, text: str) -> str:
        """A text with what stands around an item where one goes; texts come in their order."""
        return self._media.in_place(text, self._befores)


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[str], add_special_tokens: bool, room: TextRoom) -> list[int]:
    """Token ids of a text that came in pieces; special tokens belong to the first."""
    if room.keeps == "all":
        room.fit(tokenizer, "".join(pieces))
    first, *rest = pieces
    ids = tokenizer.encode(first, add_special_tokens)
    return ids + [token for piece in tokenizer.encode_batch(rest, False) for token in piece] if rest else ids


def with_media(
    media: ModelMedia, token_ids: list[int], shown: Sequence[Picture], field: str
) -> tuple[list[int], tuple[MediaAsk, ...]]:
    """A prompt whose placeholders, one for each picture, video or sound, have become their tokens, and the record of
    them. Those of a kind stand in the order in which they are shown.

    InvalidRequestError where the prompt has another number of placeholders.
    """
    if not shown and media.has_no_place(token_ids):
        return token_ids, ()
    places = [place for i in range(len(token_ids)) if (place := media.place(token_ids, i)) is not None]
    _check_places([kind for kind, _ in places], [one.kind for one in shown], field)
    if media.info.one_kind and len({one.kind for one in shown}) > 1:
        what = "this model takes pictures or sounds in a prompt, not both"
        raise UnsupportedError(f"{field}: {what}", param=field)
    if not shown:
        return token_ids, ()
    left = {kind: iter([one for one in shown if one.kind == kind]) for kind, _ in places}
    expanded: list[int] = []
    items: list[MediaItem] = []
    done = 0
    for kind, taken in places:
        picture = next(left[kind])
        expanded += token_ids[done : taken.start]
        own = media.token_ids(picture.layout)
        items += picture.items(len(expanded), own, media.kinds[kind].token_id)
        expanded += own
        done = taken.stop
    return expanded + token_ids[done:], (MediaAsk(tuple(items)),)


def _check_places(places: Sequence[MediaKind], shown: Sequence[MediaKind], field: str) -> None:
    for kind in dict.fromkeys((*shown, *places)):
        if places.count(kind) != shown.count(kind):
            what = f"{shown.count(kind)} {NOUNS[kind]}, but the prompt has {places.count(kind)} places for them"
            raise InvalidRequestError(
                f"{field}: {what}: the chat template or the text must write one for each", param=field
            )


def picture_alone(media: ModelMedia, pictures: Sequence[Picture], text: str, field: str) -> tuple[list[int], MediaAsk]:
    """The prompt of a model to which a picture is one token that stands alone; InvalidRequestError where there is more
    than that."""
    if len(pictures) != 1 or text:
        what = f"{len(pictures)} pictures beside {len(text)} characters of text"
        raise InvalidRequestError(f"{field}: a prompt of this model is a text or a picture, not {what}", param=field)
    return [media.kinds["image"].token_id], MediaAsk((pictures[0].item(0, 1),))
