"""One kind of media that a model takes, as those see it that make prompts: whose processor prepares it, and the tokens
that stand for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.media.audio.sound_processors import SOUND_PROCESSORS
from app.media.processors import PROCESSORS
from app.media.processors.base import Detail, MediaProcessor
from app.media.settings import Part, read_settings
from app.media.videos.video_processor import VideoProcessor
from app.media.videos.video_processors import VIDEO_PROCESSORS
from app.records.media import MediaKind
from app.records.media_info import MediaInfo
from app.registry import Registry
from app.text.tokenizer import Tokenizer

NOUNS: Mapping[MediaKind, str] = {"image": "pictures", "video": "videos", "audio": "sounds"}
_TABLES: Mapping[MediaKind, Registry[Any]] = {"image": PROCESSORS, "video": VIDEO_PROCESSORS, "audio": SOUND_PROCESSORS}
_PARTS: Mapping[MediaKind, Part] = {
    "image": "image_processor",
    "video": "video_processor",
    "audio": "feature_extractor",
}


class ModelItems:
    """A model's processor for media of one kind under its settings. `max_items`: most of one prompt."""

    def __init__(
        self, kind: MediaKind, info: MediaInfo, settings: Mapping[str, Any], tokenizer: Tokenizer, max_items: int
    ) -> None:
        token_id = info.placeholder(kind)
        assert token_id is not None
        self.kind, self.token_id, self.max_items = kind, token_id, max_items
        self.family = info.families[kind]
        self.refusal: str | None = None  # a setting of the checkpoint's under which nothing is prepared
        self._tokenizer = tokenizer
        self._settings = dict(settings)
        self._class: type[MediaProcessor] = _TABLES[kind].load(self.family)

    @classmethod
    def of(
        cls,
        kind: MediaKind,
        model: ModelInfo,
        info: MediaInfo,
        tokenizer: Tokenizer,
        given: Mapping[str, Any],
        max_items: int,
    ) -> ModelItems | None:
        """A model's, from its files, with those of the options `given` in their place that are this kind's; None: it
        takes none.

        CheckpointError names what of the files cannot be used.
        """
        family, token_id = processor_of(info, kind), info.placeholder(kind)
        placeholder = None if token_id is None else tokenizer.id_to_token(token_id)
        if family is None or placeholder is None:
            return None
        own = read_settings(model.directory, _PARTS[kind])
        settings = family.settings_of(own, model.hf_config)
        for name, (field, default) in family.tokens.items():
            settings[name] = tokenizer.id_to_token(int(model.hf_config.get(field) or default))
        if kind != "image" and None in settings.values():
            return None
        mine = {name: value for name, value in given.items() if name in family.options}
        items = cls(kind, info, {**settings, **mine, "placeholder": placeholder}, tokenizer, max_items)
        refused = (f"{name}={json.dumps(value)}" for name, value in family.refused.items() if own.get(name) is value)
        items.refusal = next(refused, None)
        return items

    @cached_property
    def processor(self) -> MediaProcessor:
        """The processor for items of any detail."""
        return self._class(self._settings)

    @cached_property
    def _low(self) -> MediaProcessor:
        return self._class(self.processor.low())

    def processor_for(self, detail: Detail) -> MediaProcessor:
        """The processor for items of which a request asks for so much detail."""
        return self._low if detail == "low" else self.processor

    @cached_property
    def around_ids(self) -> tuple[int | None, int | None] | None:
        """Tokens on both sides of a placeholder that an item's own tokens bring themselves; None: they do not."""
        around = self.processor.around_pad if isinstance(self.processor, VideoProcessor) else None
        return (
            None if around is None else (self._tokenizer.token_to_id(around[0]), self._tokenizer.token_to_id(around[1]))
        )


def processor_of(info: MediaInfo, kind: MediaKind) -> type[MediaProcessor] | None:
    """The class of a model's processor; None: it takes no media of the kind."""
    family = info.families.get(kind, "")
    return _TABLES[kind].load(family) if family in _TABLES[kind] else None
