"""Processors of sounds that prompts let a model hear, a family a file: the table."""

from __future__ import annotations

from app.media.audio.sound_processor import SoundProcessor
from app.registry import Registry

SOUND_PROCESSORS: Registry[type[SoundProcessor]] = Registry(
    "sound processor",
    {
        "qwen2_audio": "app.media.audio.qwen2_audio:Qwen2AudioProcessor",
        "voxtral": "app.media.audio.voxtral:VoxtralProcessor",
    },
)
