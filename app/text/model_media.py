"""One model's pictures and videos, or sounds, as those see them that make prompts: which it takes, and how each is
prepared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from app.checkpoints.fields.kinds import Kind, expect
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError, UnsupportedError
from app.media.audio.sound_processor import SoundProcessor
from app.media.audio.sound_processors import SOUND_PROCESSORS
from app.media.picture import Picture
from app.media.processors import PROCESSORS
from app.media.processors.base import Detail, Layout, MediaProcessor, Processor
from app.media.reader import MediaReader
from app.media.settings import Part, read_settings
from app.media.videos.clip import RawVideo
from app.records.media import MediaKind
from app.records.media_info import MediaInfo
from app.registry import Registry, suggestion
from app.text.model_videos import ModelVideos, family_of
from app.text.tokenizer import Tokenizer

NOUNS: Mapping[MediaKind, str] = {"image": "pictures", "video": "videos", "audio": "sounds"}
_TABLES: Mapping[MediaKind, Registry[Any]] = {"image": PROCESSORS, "audio": SOUND_PROCESSORS}
_PARTS: Mapping[MediaKind, Part] = {"image": "image_processor", "audio": "feature_extractor"}


class ModelMedia:
    """A model's processor under its settings, its `videos` where it takes some, and the `reader` of all media.
    `max_items`: most of one prompt."""

    def __init__(
        self,
        info: MediaInfo,
        settings: Mapping[str, Any],
        tokenizer: Tokenizer,
        reader: MediaReader,
        max_items: int,
        max_item_tokens: int,
        videos: ModelVideos | None = None,
    ) -> None:
        self.info = info
        self.kind = info.kind
        self.noun = NOUNS[info.kind]
        self.family = info.processor
        self.reader = reader
        self.videos = videos
        self.max_items = max_items
        self.max_item_tokens = max_item_tokens
        self.refusal: str | None = None  # a setting of the checkpoint's under which nothing is prepared
        self._tokenizer = tokenizer
        self._class: type[MediaProcessor] = _TABLES[info.kind].load(info.processor)
        self._settings = dict(settings)

    @classmethod
    def of(cls, model: ModelInfo, tokenizer: Tokenizer, reader: MediaReader, config: EngineConfig) -> ModelMedia | None:
        """A model's, from its files, under the configuration's options; None: it takes text only.

        CheckpointError names what of the files cannot be used, ConfigError an option that the processor does not have.
        """
        info = MediaInfo.of(model)
        if info is None or info.token_id is None or info.processor not in _TABLES[info.kind]:
            return None
        placeholder = tokenizer.id_to_token(info.token_id)
        if placeholder is None:
            return None
        family: type[MediaProcessor] = _TABLES[info.kind].load(info.processor)
        own = read_settings(model.directory, _PARTS[info.kind])
        settings = family.settings_of(own, model.hf_config)
        for name, (field, default) in family.tokens.items():
            settings[name] = tokenizer.id_to_token(int(model.hf_config.get(field) or default))
        given = _checked(config.mm_processor_kwargs, family.options, of_videos := _video_options(info))
        mine = {name: value for name, value in given.items() if name in family.options}

        def most(kind: MediaKind) -> int:
            return min(config.limit_mm_per_prompt.get(kind, reader.config.most(kind)), reader.config.most(kind))

        media = cls(
            info,
            {**settings, **mine, "placeholder": placeholder},
            tokenizer,
            reader,
            most(info.kind),
            config.max_item_tokens,
            ModelVideos.of(model, info, tokenizer, given, most("video")) if of_videos else None,
        )
        refused = (f"{name}={json.dumps(value)}" for name, value in family.refused.items() if own.get(name) is value)
        media.refusal = next(refused, None)
        return media

    @property
    def takes(self) -> str:
        """Says to users what a prompt may show."""
        return f"takes {self.noun}{'' if self.videos is None else ' and videos'}"

    def most(self, kind: MediaKind) -> int | None:
        """Most items of a kind in one prompt; None: the model takes none of it."""
        if kind == self.kind:
            return self.max_items
        return self.videos.max_items if kind == "video" and self.videos is not None else None

    def check(self, field: str, kind: MediaKind | None = None) -> None:
        """UnsupportedError, which names the field, where the checkpoint prepares media in a way that is not known."""
        of_video = kind == "video" and self.videos is not None
        refusal, name = (self.videos.refusal, "video") if of_video and self.videos else (self.refusal, "image")
        if refusal is not None:
            what = f"the model's {name} processor has {refusal}, which is not supported; text is served"
            raise UnsupportedError(f"{field}: {what}", param=field)

    @cached_property
    def processor(self) -> MediaProcessor:
        """The processor for items of any detail."""
        return self._class(self._settings)

    @cached_property
    def _low(self) -> MediaProcessor:
        return self._class(self.processor.low())

    def _for(self, detail: Detail) -> MediaProcessor:
        return self._low if detail == "low" else self.processor

    def num_tokens(self, data: bytes, detail: Detail = "auto") -> int:
        """Tokens of a picture by its file's header alone; 0 of a sound, of which no header is believed."""
        processor = self._for(detail)
        return self.reader.layout(data, processor).num_tokens if isinstance(processor, Processor) else 0

    def read(self, data: bytes, detail: Detail = "auto", tenant: str = "", most_tokens: int | None = None) -> Picture:
        """The item in a file, of which a request asks for so much detail, as a tenant's prompt shows it. Blocks on a
        process; errors as those of MediaReader. `most_tokens`: that a prompt has room for."""
        processor = self._for(detail)
        if isinstance(processor, Processor):
            return self.reader.read(data, self.family, processor, tenant)
        assert isinstance(processor, SoundProcessor)
        most = self._most_tokens(most_tokens)
        return self.reader.read_sound(data, self.family, processor, processor.max_s(most), tenant)

    def read_video(self, video: bytes | RawVideo, tenant: str = "", most_tokens: int | None = None) -> Picture:
        """The same of a video."""
        assert self.videos is not None
        most, videos = self._most_tokens(most_tokens), self.videos
        return self.reader.read_video(video, videos.family, videos.processor, most, tenant)

    def _most_tokens(self, most_tokens: int | None) -> int:
        return self.max_item_tokens if most_tokens is None else min(self.max_item_tokens, most_tokens)

    def place(self, token_ids: Sequence[int], index: int) -> tuple[MediaKind, slice] | None:
        """The kind of item that goes where a template wrote its placeholder, and which of the prompt's tokens its own
        take the places of; None: the token there is none."""
        if token_ids[index] == self.info.token_id:
            return self.kind, slice(index, index + 1)
        if self.videos is None or token_ids[index] != self.videos.token_id:
            return None
        around = self.videos.around_ids
        is_within = around is not None and 0 < index < len(token_ids) - 1
        if is_within and (token_ids[index - 1], token_ids[index + 1]) == around:
            return "video", slice(index - 1, index + 2)
        return "video", slice(index, index + 1)

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts that stand for media, which a user's text may not bring into a prompt as such."""
        ids = self.info.image_token_id, self.info.video_token_id, self.info.audio_token_id
        names = (self._tokenizer.id_to_token(token) for token in ids if token is not None)
        return tuple(dict.fromkeys((self.processor.written, *filter(None, names))))

    def token_ids(self, layout: Layout) -> list[int]:
        """The tokens of an item."""
        return [token for text, count in layout.runs for token in self._ids[text] * count]

    @cached_property
    def _ids(self) -> _TokenIds:
        return _TokenIds(self._tokenizer)


class _TokenIds(dict[str, list[int]]):
    """Token ids of texts that stand beside a picture's placeholders, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, text: str) -> list[int]:
        ids = self[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _video_options(info: MediaInfo) -> Mapping[str, Kind]:
    family = family_of(info)
    return {} if family is None else family.options


def _checked(options: Mapping[str, Any], *of_processors: Mapping[str, Kind]) -> dict[str, Any]:
    """Options for a model's processors, which one of them has; ConfigError otherwise."""
    known = {name: kind for kinds in of_processors for name, kind in kinds.items()}
    for name, value in options.items():
        field = f"mm_processor_kwargs.{name}"
        if name not in known:
            raise ConfigError(f"{field}: this model's processor has none; {suggestion(name, known)}", param=field)
        expect(value, known[name], field, ConfigError)
    if {"fps", "num_frames"} <= options.keys():
        field = "mm_processor_kwargs.num_frames"
        raise ConfigError(f"{field}: frames are chosen by their number or by fps, not by both", param=field)
    return dict(options)
