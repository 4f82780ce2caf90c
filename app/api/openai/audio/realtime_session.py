"""A realtime transcription session: samples are collected, become items where the client or a pause ends them, and each
item's text is sent as it comes.

An item is a POST to the route of transcriptions, of a wav file, and so has its limits, its place in queues and its line
in the log; items of a session go one after another. What is appended meanwhile waits here and is counted.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import secrets
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from app.api.http.errors import as_manta_error, error_body
from app.api.http.live_sockets import LivePeer, LiveSession
from app.api.openai.audio.realtime_item import HEADER_BYTES, WIDTH, Item, form_of
from app.api.openai.audio.realtime_protocol import (
    RATE,
    Append,
    Clear,
    Commit,
    OlderSessionUpdate,
    SessionSettings,
    TranscriptionSettings,
    event_type,
)
from app.api.openai.audio.voice_activity import Change, VoiceActivity
from app.errors import InvalidRequestError, MantaError, OverloadedError

TRANSCRIPTIONS = "/v1/audio/transcriptions"
MAX_ITEMS_WAITING = 16
LEAST_S = 0.1  # of an item that the client commits
APPEND_S_PER_BYTE = 3e-8  # what it takes to read samples and tell voices


class RealtimeSession(LiveSession):
    """Use: `open`, then `take` each event of the client, then `close`."""

    def __init__(self, peer: LivePeer, *, is_older: bool, model: str | None, max_bytes: int) -> None:
        """`is_older`: the session is told in the older form; `model`: that of the address; `max_bytes`: of an item."""
        self._peer, self._is_older = peer, is_older
        self._max_bytes = max(WIDTH, max_bytes - HEADER_BYTES)
        self._settings = SessionSettings(TranscriptionSettings(model=model))
        self._id, self._expires_at = f"sess_{secrets.token_hex(12)}", int(time.time() + peer.max_s)
        self._buffer = bytearray()
        self._begin = 0  # sample of the session at which the buffer begins
        self._voice: VoiceActivity | None = None
        self._item_id = ""  # of the item that is being said
        self._last_id: str | None = None  # of the item before
        self._items: deque[Item] = deque()
        self._is_writing = False
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._listen_anew()

    @property
    def is_busy(self) -> bool:
        """True while items wait for their texts."""
        return bool(self._items) or self._is_writing

    async def open(self) -> None:
        """Tell the client of the session."""
        self._writer = asyncio.create_task(self._write())
        await self._say_session("created")

    async def close(self) -> None:
        """End what still runs."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def finish(self) -> None:
        """Wait until the items so far have their texts."""
        while self.is_busy:
            self._wake.clear()
            await self._wake.wait()

    async def take(self, event: Mapping[str, Any]) -> None:
        """One event of the client."""
        kind = event_type(event)
        given = kind.model_validate(event)
        if isinstance(given, Append):
            await self._append(*await self._held(given.audio))
        elif isinstance(given, Commit):
            await self._commit_by_client()
        elif isinstance(given, Clear):
            self._forget(len(self._buffer))
            self._listen_anew()
            await self._say("input_audio_buffer.cleared")
        else:
            vad, self._is_older = self._settings.vad, isinstance(given, OlderSessionUpdate)
            self._settings = self._settings.after(given, event)
            if self._settings.vad != vad:
                self._listen_anew()
            await self._say_session("updated")

    # ---- samples

    async def _held(self, audio: str) -> tuple[bytes, list[Change]]:
        """The samples of an event, which count as held, and where voices begin and end in them."""
        most = len(audio) * 3 // 4
        if not self._peer.holding.grow(most):
            raise OverloadedError("sounds and requests in flight leave no room for more samples; try later")
        kept = 0
        try:
            data, changes = await self._peer.work.run(APPEND_S_PER_BYTE * len(audio), self._heard, audio)
            kept = len(data)
        finally:
            self._peer.holding.give_back(most - kept)
        return data, changes

    def _heard(self, audio: str) -> tuple[bytes, list[Change]]:
        try:
            data = base64.b64decode(audio, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequestError(f"audio: is no base64: {error}", param="audio") from None
        if len(data) % WIDTH:
            raise InvalidRequestError(f"audio: {len(data)} bytes are no samples of 16 bits", param="audio")
        if len(data) > self._max_bytes:
            raise InvalidRequestError(f"audio: at most {self._max_bytes} bytes make an item", param="audio")
        if self._voice is None and len(self._buffer) + len(data) > self._max_bytes:
            words = f"audio: the buffer holds at most {self._max_bytes} bytes: commit it, or clear it"
            raise InvalidRequestError(words, param="audio")
        return data, [] if self._voice is None else self._voice.feed(np.frombuffer(data, "<i2"))

    async def _append(self, data: bytes, changes: list[Change]) -> None:
        if self._voice is not None and self._item_id and len(self._buffer) + len(data) > self._max_bytes:
            await self._end_item(self._end)  # it is said without a pause: what comes is the next one
            await self._begin_item(self._end)
        self._buffer += data
        for change in changes:
            if change.is_begin:
                await self._begin_item(self._heard_from + change.at - self._padding)
            else:
                await self._end_item(self._heard_from + change.at)
        if self._voice is not None and not self._item_id:
            self._forget(max(0, len(self._buffer) - WIDTH * (self._padding + RATE // 10)))

    @property
    def _end(self) -> int:
        return self._begin + len(self._buffer) // WIDTH

    @property
    def _padding(self) -> int:
        vad = self._settings.vad
        return 0 if vad is None else vad.prefix_padding_ms * RATE // 1_000

    def _forget(self, num_bytes: int) -> None:
        del self._buffer[:num_bytes]
        self._begin += num_bytes // WIDTH
        self._peer.holding.give_back(num_bytes)

    def _listen_anew(self) -> None:
        vad = self._settings.vad
        self._item_id, self._heard_from = "", self._end  # the sample from which voices are looked for
        self._voice = None if vad is None else VoiceActivity(RATE, vad.threshold, vad.silence_duration_ms / 1_000)

    async def _begin_item(self, at: int) -> None:
        """Speech begins at a sample, as the detection counts them; what was before it is forgotten."""
        self._item_id = _new_id()
        self._forget(min(len(self._buffer), WIDTH * max(0, at - self._begin)))
        await self._say("input_audio_buffer.speech_started", audio_start_ms=_ms(self._begin), item_id=self._item_id)

    async def _end_item(self, at: int) -> None:
        item_id, self._item_id = self._item_id, ""
        await self._say("input_audio_buffer.speech_stopped", audio_end_ms=_ms(at), item_id=item_id)
        await self._commit(item_id, WIDTH * (at - self._begin))

    async def _commit_by_client(self) -> None:
        if len(self._buffer) < WIDTH * LEAST_S * RATE:
            held = _ms(len(self._buffer) // WIDTH)
            words = f"the buffer holds {held} ms of sound; an item has at least {LEAST_S * 1_000:g} ms"
            raise EmptyCommitError(words)
        item_id = self._item_id or _new_id()
        if self._voice is not None:
            self._voice.pause()
        self._item_id = ""
        await self._commit(item_id, len(self._buffer))

    async def _commit(self, item_id: str, num_bytes: int) -> None:
        """The first bytes of the buffer become an item."""
        samples, before = bytes(self._buffer[:num_bytes]), self._last_id
        del self._buffer[:num_bytes]  # they stay counted until they are posted
        self._begin += num_bytes // WIDTH
        self._last_id = item_id
        await self._say("input_audio_buffer.committed", previous_item_id=before, item_id=item_id)
        content = [{"type": "input_audio", "transcript": None}]
        item = {"id": item_id, "type": "message", "role": "user", "status": "completed", "content": content}
        for kind in ("created",) if self._is_older else ("added", "done"):
            await self._say(f"conversation.item.{kind}", previous_item_id=before, item=item)
        if self._settings.transcription is None:
            self._peer.holding.give_back(len(samples))
        elif len(self._items) >= MAX_ITEMS_WAITING:
            self._peer.holding.give_back(len(samples))
            error = OverloadedError(f"{MAX_ITEMS_WAITING} items wait for their texts already")
            await self._fail(item_id, error_body(error)["error"])
        else:
            self._items.append(Item(item_id, samples, self._settings))
            self._wake.set()

    # ---- texts

    async def _write(self) -> None:
        while True:
            while not self._items:
                self._wake.clear()
                await self._wake.wait()
            item, self._is_writing = self._items.popleft(), True
            try:
                await self._transcribe(item)
            except Exception as error:  # the session goes on
                await self._fail(item.item_id, error_body(as_manta_error(error))["error"])
            self._is_writing = False
            self._wake.set()

    async def _transcribe(self, item: Item) -> None:
        form, content_type = form_of(item)
        self._peer.holding.give_back(len(item.samples))  # from here on it counts as a POST's body
        said: dict[str, Any] = {"item_id": item.item_id, "content_index": 0}
        name = "conversation.item.input_audio_transcription"

        async def heard(text: str) -> None:
            if text == "[DONE]":
                return
            event = json.loads(text)
            logprobs = {"logprobs": event["logprobs"]} if event.get("logprobs") is not None else {}
            if event.get("type") == "transcript.text.delta":
                await self._say(f"{name}.delta", **said, delta=event["delta"], **logprobs)
            elif event.get("type") == "transcript.text.done":
                await self._say(f"{name}.completed", **said, transcript=event["text"], usage=event["usage"], **logprobs)
            else:
                await self._fail(item.item_id, event["error"])

        await self._peer.post(TRANSCRIPTIONS, content_type, form, heard)

    async def _fail(self, item_id: str, error: Mapping[str, Any]) -> None:
        named = {name: error.get(name) for name in ("type", "code", "message", "param")}
        await self._say(
            "conversation.item.input_audio_transcription.failed", item_id=item_id, content_index=0, error=named
        )

    # ---- events

    async def refuse(self, error: MantaError, event: Mapping[str, Any]) -> None:
        """Say what is wrong with an event; the session goes on."""
        event_id = event.get("event_id")
        described = error_body(error)["error"] | {"event_id": event_id if isinstance(event_id, str) else None}
        await self._say("error", error=described)

    async def _say_session(self, what: str) -> None:
        name = "transcription_session" if self._is_older else "session"
        session = self._settings.described(self._id, self._expires_at, is_older=self._is_older)
        await self._say(f"{name}.{what}", session=session)

    async def _say(self, kind: str, **fields: Any) -> None:
        await self._peer.send({"type": kind, "event_id": f"event_{secrets.token_hex(12)}", **fields})


class EmptyCommitError(InvalidRequestError):
    """There is too little to be an item."""

    code = "input_audio_buffer_commit_empty"


def _new_id() -> str:
    return f"item_{secrets.token_hex(12)}"


def _ms(samples: int) -> int:
    return samples * 1_000 // RATE
