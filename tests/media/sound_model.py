"""Models that hear sounds in their prompts: the tokens, templates and extractors of the families, with
everything but weights, and a tokenizer that fits tiny random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from app.config.engine import EngineConfig
from app.media.reader import MediaReader
from app.text.model_media import ModelMedia
from app.text.served_model import ServedModel
from tests.api.conftest import served

SOUND = 306  # the placeholder of every tiny model
_PAD = ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
MARKS = {
    **dict.fromkeys(("qwen2_audio", "qwen2_5_omni"), ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")),
    **{"voxtral": ("[AUDIO]", "[BEGIN_AUDIO]", ""), "qwen3_asr": _PAD, "qwen3_omni": _PAD},
    "gemma4": ("<|audio|>", "<|audio>", "<audio|>"),
    "audio_flamingo": ("<sound>", "", ""),
}
BARE = ("gemma4",)  # whose templates write the placeholder alone
TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'audio' -%}
BEGINSOUNDEND{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def place_of(name: str) -> str:
    """What the family's template writes where a sound goes."""
    sound, begin, end = MARKS[name]
    return sound if name in BARE else f"{begin}{sound}{end}"


def write_talk(path: Path, name: str, extractor: dict[str, Any]) -> None:
    """Write tokenizer, template and the settings of the extractor beside a tiny model's config."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    own = [mark for mark in MARKS[name] if mark]
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", *(f"<|{i}|>" for i in range(258, SOUND)), *own])
    assert backend.token_to_id(own[0]) == SOUND
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("BEGINSOUNDEND", place_of(name)))
    settings = path / "preprocessor_config.json"
    settings.unlink(missing_ok=True)  # it may be a link to a file that other tests read
    settings.write_text(json.dumps(extractor))


def write_sound_model(path: Path, name: str, max_len: int = 512) -> Path:
    """Write the directory of one that hears windows of a second, without weights."""
    path.mkdir()
    ears = {"num_mel_bins": 12, "max_source_positions": 50, "hidden_size": 32, "intermediate_size": 64}
    text = {"vocab_size": 331, "max_position_embeddings": max_len, "hidden_size": 64, "num_hidden_layers": 1}
    ids = {"audio_token_index" if name == "qwen2_audio" else "audio_token_id": SOUND}
    kind = {"qwen2_audio": "Qwen2AudioForConditionalGeneration", "voxtral": "VoxtralForConditionalGeneration"}[name]
    config = {"architectures": [kind], "model_type": name, "audio_config": ears, "text_config": text, **ids}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    write_talk(path, name, {"feature_size": 12, "sampling_rate": 16_000, "chunk_length": 1})
    return path


def hearing(path: Path, own: MediaReader, name: str = "m", **options: Any) -> ServedModel:
    """The model in `path` as the ingress would serve it."""
    model = served(path, name)
    model.media = ModelMedia.of(model.info, model.tokenizer, own, EngineConfig(**options))
    return model
