"""`stream_interval`: the tokens of a stream in pieces of so many, for clients that would rather read less often."""

from __future__ import annotations

from app.text.output_processor import TextDelta


class Gatherer:
    """Gathers the deltas of one choice. The first passes at once, and so does the last, with all that was held."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: TextDelta | None = None
        self._has_begun = False

    def push(self, delta: TextDelta) -> TextDelta | None:
        """Take a delta; return what is to be sent now."""
        if self._held is not None:
            delta = _joined(self._held, delta)
        is_due = not self._has_begun or len(delta.token_ids) >= self._interval or delta.finish_reason is not None
        self._has_begun = True
        self._held = None if is_due else delta
        return delta if is_due else None


def _joined(first: TextDelta, last: TextDelta) -> TextDelta:
    """Two deltas as one; how it ends is the last one's to say."""
    last.text = first.text + last.text
    last.token_ids = first.token_ids + last.token_ids
    if first.logprobs is not None or last.logprobs is not None:
        last.logprobs = [*(first.logprobs or ()), *(last.logprobs or ())]
        last.text_offsets = [*(first.text_offsets or ()), *(last.text_offsets or ())]
    last.prompt_logprobs = first.prompt_logprobs or last.prompt_logprobs
    return last
