"""Subtitles of a transcript: SubRip, and WebVTT as the W3C describes it."""

from __future__ import annotations

from collections.abc import Iterable

from app.api.openai.audio.segments import Segment

_ARROW = "-->"


def srt(segments: Iterable[Segment]) -> str:
    """Numbered cues."""
    cues = (
        f"{i}\n{_time(one.begin_s, ',')} {_ARROW} {_time(one.end_s, ',')}\n{_line(one.text)}\n"
        for i, one in enumerate(segments, start=1)
    )
    return "\n".join(cues)


def vtt(segments: Iterable[Segment]) -> str:
    """Cues behind the format's own first line; what would be markup is text."""
    cues = (f"{_time(one.begin_s, '.')} {_ARROW} {_time(one.end_s, '.')}\n{_escaped(one.text)}\n" for one in segments)
    return "\n".join(("WEBVTT\n", *cues))


def _time(seconds: float, mark: str) -> str:
    whole_s, ms = divmod(round(seconds * 1_000), 1_000)
    return f"{whole_s // 3_600:02}:{whole_s // 60 % 60:02}:{whole_s % 60:02}{mark}{ms:03}"


def _line(text: str) -> str:
    """A cue's text as one line: an empty one would end it."""
    return " ".join(text.split()).replace(_ARROW, "->")


def _escaped(text: str) -> str:
    return _line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
