"""A transcript as OpenAI streams it: `transcript.text.delta` for each piece of text, then `transcript.text.done`."""

from __future__ import annotations

import json
from typing import Any

from app.api.generation.events import Event
from app.api.generation.sse import DONE, EventFormat
from app.api.http.work_pool import RequestWork
from app.api.openai.audio.listening import Listening
from app.api.openai.audio.transcript import Transcript, token_logprobs


class TranscriptEvents(EventFormat):
    """Writes what a Listening hears. The deltas together are the last event's text: no space before it or behind."""

    def __init__(self, listening: Listening, work: RequestWork, with_logprobs: bool) -> None:
        self._listening = listening
        self._work = work
        self._with_logprobs = with_logprobs
        self._has_begun = False
        self._last = ""
        self._spaces = ""  # behind what was said so far
        self._logprobs: list[dict[str, Any]] = []

    def start(self) -> str:
        """Nothing comes before the text."""
        return ""

    async def may_begin(self) -> None:
        """Once the file is read: one that breaks off is refused."""
        await self._listening.whole_file()

    def event(self, event: Event) -> str:
        """One delta; "" where an output brings no text."""
        _, delta = event
        if self._with_logprobs and delta.logprobs:
            self._logprobs += token_logprobs(delta.logprobs, self._listening.ask)
        text = self._trimmed(delta.text)
        if not text:
            return ""
        said: dict[str, Any] = {"type": "transcript.text.delta", "delta": text}
        if self._with_logprobs:
            said["logprobs"], self._logprobs = self._logprobs, []
        return _written(said)

    def _trimmed(self, text: str) -> str:
        whole = self._spaces + text
        shown = whole.rstrip()
        self._spaces = whole[len(shown) :]
        if not self._has_begun:
            shown = shown.lstrip()
            self._spaces = self._spaces if shown else ""
            self._has_begun = bool(shown)
        return shown

    async def finish(self) -> None:
        """Write the last event, which is as long as all others together."""
        own = self._listening
        transcript = Transcript(own.ask, own.heard, own.language, own.seconds)
        self._last = await self._work.run_later(transcript.writing_cost_s, self._done, transcript)

    def end(self) -> str:
        """The whole text, and what it took."""
        return self._last + DONE

    def _done(self, transcript: Transcript) -> str:
        said: dict[str, Any] = {"type": "transcript.text.done", "text": transcript.text}
        if self._with_logprobs:
            said["logprobs"] = transcript.json(True)["logprobs"]
        return _written({**said, "usage": transcript.token_usage()})


def _written(said: dict[str, Any]) -> str:
    return f"data: {json.dumps(said, ensure_ascii=False)}\n\n"
