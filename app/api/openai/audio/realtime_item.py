"""An item of a realtime session, and the form in which it is posted to be transcribed: a wav file."""

from __future__ import annotations

import io
import secrets
import wave
from dataclasses import dataclass

from app.api.openai.audio.realtime_protocol import RATE, SessionSettings

WIDTH = 2  # bytes of a sample
HEADER_BYTES = 1 << 12  # of a wav file and its form


@dataclass(slots=True, frozen=True)
class Item:
    """Holds samples that wait for their text, and how they are to be heard."""

    item_id: str
    samples: bytes
    settings: SessionSettings


def form_of(item: Item) -> tuple[bytes, str]:
    """The body of a POST that transcribes an item, and its type."""
    settings = item.settings.transcription
    assert settings is not None
    given = {"model": settings.model, "language": settings.language, "prompt": settings.prompt, "stream": "true"}
    fields = [(name, value) for name, value in given.items() if value is not None]
    fields += [("include[]", "logprobs")] if item.settings.has_logprobs else []
    boundary = secrets.token_hex(16)
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields
    ]
    file = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="item.wav"\r\n\r\n'
    body = "".join(parts).encode() + file.encode() + _wav(item.samples) + f"\r\n--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def _wav(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(WIDTH)
        out.setframerate(RATE)
        out.writeframes(samples)
    return file.getvalue()
