"""Processors of sounds that prompts let a model hear, a family a file: the table."""

from __future__ import annotations

from app.media.audio.sound_processor import SoundProcessor
from app.registry import Registry

SOUND_PROCESSORS: Registry[type[SoundProcessor]] = Registry(
    "sound processor",
    {
        "audio_flamingo": "app.media.audio.audio_flamingo:AudioFlamingoProcessor",
        "gemma3n": "app.media.audio.gemma:Gemma3nSounds",
        "gemma4": "app.media.audio.gemma:Gemma4Sounds",
        "phi4": "app.media.audio.phi4:Phi4Sounds",
        "qwen2_5_omni": "app.media.audio.qwen_omni:Qwen2_5OmniSounds",
        "qwen2_audio": "app.media.audio.qwen2_audio:Qwen2AudioProcessor",
        "qwen3_asr": "app.media.audio.qwen_omni:Qwen3AsrSounds",
        "qwen3_omni": "app.media.audio.qwen_omni:Qwen3OmniSounds",
        "voxtral": "app.media.audio.voxtral:VoxtralProcessor",
    },
)
