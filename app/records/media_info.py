"""Reads from a model's config.json which pictures or sounds it takes: whose processor, and the tokens that stand for
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.checkpoints.added_tokens import added_token_id
from app.checkpoints.model_info import ModelInfo
from app.records.media import MediaKind

# Families of processors (app/media/processors) by model type.
PROCESSORS = {
    "qwen2_vl": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "qwen3_vl_moe": "qwen_vl",
    "qwen3_5": "qwen_vl",
    "qwen3_5_moe": "qwen_vl",
    "qwen2_5_omni_thinker": "qwen_vl",
    "qwen3_omni_moe_thinker": "qwen_vl",
    "clip": "clip_tower",
    "siglip": "clip_tower",
    "llava": "clip",
    "llava_next": "llava_next",
    "llava_onevision": "llava_onevision",
    "kimi_k25": "kimi",
    "kimi_vl": "kimi",
    "gemma3": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "llama4": "llama4",
    "lfm2_vl": "lfm2_vl",
    "lighton_ocr": "lighton_ocr",
    "glm_ocr": "glm_ocr",
    "glm4v": "glm_ocr",
    "glm4v_moe": "glm_ocr",
    "paddleocr_vl": "paddleocr_vl",
    "paligemma": "clip",
    "mistral3": "pixtral",
    "phi4_multimodal": "phi4",
    "aya_vision": "aya_vision",
    "cohere2_vision": "cohere2_vision",
    "internvl": "internvl",
    "internvl_chat": "internvl_chat",
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
}
# Families of processors of videos (app/media/videos) by model type.
VIDEO_PROCESSORS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), "qwen2_vl"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3_vl"),
    "llava_onevision": "llava_onevision",
    **dict.fromkeys(("glm4v", "glm4v_moe"), "glm4v"),
}
_PICTURES_IN_VIDEOS = ("glm4v",)  # families whose videos consist of the tokens of pictures
# Families of processors of sounds (app/media/audio) by model type.
SOUND_PROCESSORS = {
    "audioflamingo3": "audio_flamingo",
    "qwen2_audio": "qwen2_audio",
    "voxtral": "voxtral",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "phi4_multimodal": "phi4",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni",
    **dict.fromkeys(("qwen3_asr", "qwen3_asr_thinker"), "qwen3_asr"),
}
_AUDIO_FIELDS, _VIDEO_FIELDS = ("audio_token_id", "audio_token_index"), ("video_token_id", "video_token_index")
_DEFAULT_AUDIO_IDS = {
    **dict.fromkeys(("qwen2_audio", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), 151_646),
    **{"voxtral": 24, "gemma3n": 262_273, "gemma4": 258_881, "phi4_multimodal": 200_011},
    **dict.fromkeys(("qwen3_asr", "qwen3_asr_thinker"), 151_676),
    "audioflamingo3": 151_669,
}
_BY_GRID = ("qwen_vl", "glm_ocr", "paddleocr_vl")  # processors whose pictures have positions by row and column
# Names of the fields that hold the placeholders, beside `image_token_id` and `video_token_id`.
_IMAGE_FIELDS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_IMAGE_TEXTS = {"internvl_chat": "<IMG_CONTEXT>"}  # placeholders, where no field names them
_DEFAULT_IDS = {
    **{"gemma3": 262_144, "gemma3n": 262_145, "gemma4": 258_880, "mistral3": 10},
    **{"llava": 32_000, "llava_next": 32_000, "llava_onevision": 151_646},
    **{"internvl": 151_667, "idefics3": 128_257, "lighton_ocr": 151_655, "glm_ocr": 59_280, "llama4": 200_092},
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), 151_655),
    **{"aya_vision": 255_036, "cohere2_vision": 255_036, "lfm2_vl": 396},
    **{"glm4v": 151_343, "glm4v_moe": 151_363},
    **dict.fromkeys(("kimi_k25", "kimi_vl"), 163_605),
    **{"phi4_multimodal": 200_010, "paddleocr_vl": 100_295, "paligemma": 256_000, "clip": 0, "siglip": 0},
}


@dataclass(slots=True, frozen=True)
class MediaInfo:
    """One model's pictures, videos and sounds."""

    processor: str  # the family that prepares pixels of pictures; none where there is no token for them
    # Stands in prompts where the embedding of a piece of a picture goes; None: it takes no pictures.
    image_token_id: int | None
    video_token_id: int | None = None  # None: it takes no videos
    spatial_merge: int = 1  # patches along each side that become one token
    # Tokens of a picture that see each other, so that one step computes all that are left of it; 0: they do not.
    whole_tokens: int = 0
    audio_token_id: int | None = None  # None: it takes no sounds
    is_alone: bool = False  # a prompt is a picture or a text
    video_processor: str = ""  # the family that prepares videos; none where there is no token for them
    video_piece_id: int | None = None  # stands for a piece of a video; None: the token that templates write does
    sound_processor: str = ""  # likewise for sounds
    one_kind: bool = False  # a prompt holds pictures or sounds, not both

    @property
    def families(self) -> dict[MediaKind, str]:
        """Families that prepare what a prompt may show, by its kind."""
        named: dict[MediaKind, str] = {
            **{"image": self.processor, "video": self.video_processor, "audio": self.sound_processor}
        }
        return {kind: family for kind, family in named.items() if family}

    def placeholder(self, kind: MediaKind) -> int | None:
        """The token that templates write where such an item goes."""
        ids = {"image": self.image_token_id, "video": self.video_token_id, "audio": self.audio_token_id}
        return ids[kind]

    def piece(self, kind: MediaKind) -> int | None:
        """The token that stands for a piece of such an item, and so for its embeddings."""
        has_own = kind == "video" and self.video_piece_id is not None
        return self.video_piece_id if has_own else self.placeholder(kind)

    @classmethod
    def of(cls, info: ModelInfo) -> MediaInfo | None:
        """Read it; None: the model takes text only."""
        hf, kind = info.hf_config, str(info.hf_config.get("model_type"))
        seen, heard = _seen(info, kind), _heard(hf, kind)
        if seen is None or heard is None:
            return seen or heard
        return replace(
            seen,
            audio_token_id=heard.audio_token_id,
            sound_processor=heard.sound_processor,
            one_kind=kind == "phi4_multimodal",  # whose sounds beside pictures are projected in another way
        )


def _heard(hf: Mapping[str, Any], kind: str) -> MediaInfo | None:
    """Sounds alone."""
    if kind not in SOUND_PROCESSORS or not isinstance(hf.get("audio_config"), dict):
        return None
    places = hf, hf["audio_config"]
    sounds = (own[name] for own in places for name in _AUDIO_FIELDS if isinstance(own.get(name), int))
    token_id = next(sounds, _DEFAULT_AUDIO_IDS[kind])
    return MediaInfo("", None, audio_token_id=token_id, sound_processor=SOUND_PROCESSORS[kind])


def _seen(info: ModelInfo, kind: str) -> MediaInfo | None:
    """Pictures and videos alone."""
    hf: Mapping[str, Any] = info.hf_config
    vision: Any = hf.get("vision_config")
    if kind not in PROCESSORS or not isinstance(vision, dict):
        return None
    processor = "pixtral" if vision.get("model_type") == "pixtral" else PROCESSORS[kind]
    names = (own[name] for own in (hf, vision) for name in _IMAGE_FIELDS if isinstance(own.get(name), int))
    image = next(names, _DEFAULT_IDS.get(kind))
    if image is None and kind in _IMAGE_TEXTS:
        image = added_token_id(info.directory, _IMAGE_TEXTS[kind])
    if image is None:
        return None
    video = next((hf[name] for name in _VIDEO_FIELDS if hf.get(name) is not None), None)
    video = video if kind in VIDEO_PROCESSORS else None
    whole = int(hf.get("mm_tokens_per_image", 256)) if kind == "gemma3" else 0
    if kind == "gemma4" and hf.get("use_bidirectional_attention") == "vision":
        whole = int(hf.get("vision_soft_tokens_per_image") or 280)
    usual = 2 if processor in _BY_GRID else 1
    merge = vision.get("spatial_merge_size") or hf.get("spatial_merge_size") or usual
    family = "" if video is None else VIDEO_PROCESSORS[kind]
    return MediaInfo(
        processor,
        int(image),
        None if video is None else int(video),
        int(merge),
        whole,
        is_alone=processor == "clip_tower",
        video_processor=family,
        video_piece_id=int(image) if family in _PICTURES_IN_VIDEOS else None,
    )
