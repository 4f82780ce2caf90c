"""Subtitles by their grammars, written out here from what SubRip and the W3C say."""

from __future__ import annotations

import re

from app.api.openai.audio.segments import Segment
from app.api.openai.audio.subtitles import srt, vtt

SEGMENTS = [
    Segment(0.0, 1.2345, " Hello there. ", ()),
    Segment(1.2345, 61.0, "two\n\nlines --> <b>& more</b>", ()),
    Segment(3_599.9996, 36_001.5, "late", ()),
]
TIME = r"\d{2,}:[0-5]\d:[0-5]\d"
SRT = re.compile(rf"(?:\d+\n{TIME},\d{{3}} --> {TIME},\d{{3}}\n[^\n]+\n(?:\n|\Z))*")
VTT = re.compile(rf"WEBVTT\n(?:\n{TIME}\.\d{{3}} --> {TIME}\.\d{{3}}\n[^\n<>]+\n)*")


def test_srt() -> None:
    text = srt(SEGMENTS)
    assert SRT.fullmatch(text)
    assert text.startswith("1\n00:00:00,000 --> 00:00:01,234\nHello there.\n\n2\n00:00:01,234 --> 00:01:01,000\n")
    assert "two lines -> <b>& more</b>" in text
    assert "3\n01:00:00,000 --> 10:00:01,500\nlate\n" in text


def test_vtt() -> None:
    text = vtt(SEGMENTS)
    assert VTT.fullmatch(text)
    assert "two lines -&gt; &lt;b&gt;&amp; more&lt;/b&gt;" in text


def test_nothing_was_said() -> None:
    assert srt([]) == ""
    assert vtt([]) == "WEBVTT\n"
