"""One model's pictures, videos and sounds, as those see them that make prompts: which it takes, and how each is
prepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

import numpy as np

from app.checkpoints.fields.kinds import Kind, expect
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError, UnsupportedError
from app.media.audio.sound_processor import SoundProcessor
from app.media.picture import Picture
from app.media.processors.base import Detail, Layout, Pixels, Processor
from app.media.reader import MediaReader
from app.media.videos.clip import RawVideo
from app.media.videos.video_processor import VideoProcessor
from app.records.media import MediaKind
from app.records.media_info import MediaInfo
from app.registry import suggestion
from app.text.model_items import NOUNS, ModelItems, processor_of
from app.text.tokenizer import Tokenizer

MOST_TEXTS = 4096  # whose token ids are kept


class ModelMedia:
    """Kinds of media that a model takes, and the `reader` of all media."""

    def __init__(
        self,
        info: MediaInfo,
        kinds: Mapping[MediaKind, ModelItems],
        tokenizer: Tokenizer,
        reader: MediaReader,
        max_item_tokens: int,
    ) -> None:
        self.info = info
        self.kinds = dict(kinds)
        self.reader = reader
        self.max_item_tokens = max_item_tokens
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model: ModelInfo, tokenizer: Tokenizer, reader: MediaReader, config: EngineConfig) -> ModelMedia | None:
        """A model's, from its files, under the configuration's options; None: it takes text only.

        CheckpointError names what of the files cannot be used, ConfigError an option that no processor has.
        """
        info = MediaInfo.of(model)
        if info is None:
            return None
        kinds: tuple[MediaKind, ...] = get_args(MediaKind)
        given = _checked(config.mm_processor_kwargs, [processor_of(info, kind) for kind in kinds])
        found: dict[MediaKind, ModelItems] = {}
        for kind in kinds:
            most = min(config.limit_mm_per_prompt.get(kind, reader.config.most(kind)), reader.config.most(kind))
            items = ModelItems.of(kind, model, info, tokenizer, given, most)
            if items is not None:
                found[kind] = items
        return cls(info, found, tokenizer, reader, config.max_item_tokens) if found else None

    @property
    def takes(self) -> str:
        """Says to users what a prompt may show."""
        *others, last = [NOUNS[kind] for kind in self.kinds]
        return f"takes {', '.join(others)} and {last}" if others else f"takes {last}"

    def most(self, kind: MediaKind) -> int | None:
        """Most items of a kind in one prompt; None: the model takes none of it."""
        return self.kinds[kind].max_items if kind in self.kinds else None

    def check(self, field: str, kind: MediaKind) -> None:
        """UnsupportedError, which names the field, where the checkpoint prepares media in a way that is not known."""
        refusal = self.kinds[kind].refusal
        if refusal is not None:
            what = f"the model's {kind} processor has {refusal}, which is not supported; text is served"
            raise UnsupportedError(f"{field}: {what}", param=field)

    def num_tokens(self, kind: MediaKind, data: bytes, detail: Detail = "auto") -> int:
        """Tokens of a picture by its file's header alone; 0 of others, of which no header is believed."""
        processor = self.kinds[kind].processor_for(detail)
        return self.reader.layout(data, processor).num_tokens if isinstance(processor, Processor) else 0

    def read(
        self,
        kind: MediaKind,
        data: bytes | Pixels | RawVideo,
        detail: Detail = "auto",
        tenant: str = "",
        most_tokens: int | None = None,
    ) -> Picture:
        """The item in a file, pixels or a video's frames, of which a request asks for so much detail, as a tenant's
        prompt shows it. Blocks on a process; errors as those of MediaReader. `most_tokens`: for which there is room."""
        items, reader = self.kinds[kind], self.reader
        processor = items.processor_for(detail)
        most = self.max_item_tokens if most_tokens is None else min(self.max_item_tokens, most_tokens)
        if isinstance(processor, VideoProcessor):
            assert not isinstance(data, np.ndarray)
            return reader.read_video(data, items.family, processor, most, tenant)
        assert not isinstance(data, RawVideo)
        if isinstance(processor, Processor):
            return reader.read(data, items.family, processor, tenant)
        assert isinstance(processor, SoundProcessor)
        assert isinstance(data, bytes)
        return reader.read_sound(data, items.family, processor, processor.max_s(most), tenant)

    def place(self, token_ids: Sequence[int], index: int) -> tuple[MediaKind, slice] | None:
        """The kind of item that goes where a template wrote its placeholder, and which of the prompt's tokens its own
        take the places of; None: the token there is none."""
        kind = self._by_token.get(token_ids[index])
        if kind is None:
            return None
        around = self.kinds[kind].around_ids
        is_within = around is not None and 0 < index < len(token_ids) - 1
        if is_within and (token_ids[index - 1], token_ids[index + 1]) == around:
            return kind, slice(index - 1, index + 2)
        return kind, slice(index, index + 1)

    def has_no_place(self, token_ids: Sequence[int]) -> bool:
        """True where no token stands for an item."""
        return self._by_token.keys().isdisjoint(token_ids)

    @cached_property
    def _by_token(self) -> dict[int, MediaKind]:
        return {items.token_id: kind for kind, items in reversed(self.kinds.items())}

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts that stand for media, which a user's text may not bring into a prompt as such."""
        ids = self.info.image_token_id, self.info.video_token_id, self.info.audio_token_id
        names = (self._tokenizer.id_to_token(token) for token in ids if token is not None)
        written = (items.processor.written for items in self.kinds.values())
        return tuple(dict.fromkeys((*written, *filter(None, names))))

    def in_place(self, text: str, befores: Mapping[MediaKind, Iterator[str]]) -> str:
        """A text with what stands around an item where one goes, behind the next text of its kind in `befores`."""
        for kind, items in self.kinds.items():
            own = items.processor
            begin, end = own.around
            if (whole := begin + own.placeholder + end) != own.written:
                first, *rest = text.split(own.written)
                text = first + "".join(next(befores[kind], "") + whole + part for part in rest)
        return text

    def token_ids(self, layout: Layout) -> list[int]:
        """The tokens of an item."""
        return [token for text, count in layout.runs for token in self._ids[text] * count]

    @cached_property
    def _ids(self) -> _TokenIds:
        return _TokenIds(self._tokenizer)


class _TokenIds(dict[str, list[int]]):
    """Token ids of texts that stand beside a picture's placeholders, each looked up once; so many are kept, as those
    of videos say times."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, text: str) -> list[int]:
        if len(self) >= MOST_TEXTS:
            self.clear()
        ids = self[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _checked(options: Mapping[str, Any], processors: Sequence[Any]) -> dict[str, Any]:
    """Options for a model's processors, which one of them has; ConfigError otherwise."""
    known: dict[str, Kind] = {}
    for processor in processors:
        known |= {} if processor is None else processor.options
    for name, value in options.items():
        field = f"mm_processor_kwargs.{name}"
        if name not in known:
            raise ConfigError(f"{field}: this model's processor has none; {suggestion(name, known)}", param=field)
        expect(value, known[name], field, ConfigError)
    if {"fps", "num_frames"} <= options.keys():
        field = "mm_processor_kwargs.num_frames"
        raise ConfigError(f"{field}: frames are chosen by their number or by fps, not by both", param=field)
    return dict(options)
