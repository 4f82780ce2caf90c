"""Texts to calibrate with, and others to judge by: every fourth of a file is held out for the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from app.checkpoints.model_info import ASSETS
from app.errors import ConfigError, InvalidRequestError
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer

OWN = ASSETS / "tiny-chat" / "heldout.jsonl"
HELD_OUT = 4  # one of so many
MOST_LINES = 100_000  # of a file, from its beginning
_CHARS_PER_TOKEN = 16  # at most so many are tokenized for each token that is wanted


@dataclass(slots=True, frozen=True)
class Texts:
    """Token ids of each."""

    calibration: Sequence[Sequence[int]]
    held_out: Sequence[Sequence[int]]

    @classmethod
    def read(cls, file: Path | None, directory: Path, samples: int, length: int, vocab_size: int) -> Texts:
        """At most `samples` to calibrate with and a third as many held out, of at most `length` tokens each, from all
        over the file. ConfigError names an unusable one."""
        reader = _Reader(directory, length, file or OWN)
        wanted = samples + -(-samples // (HELD_OUT - 1))
        texts = [text for text in reader.texts(wanted) if len(text) > 1]
        held_out = texts[HELD_OUT - 1 :: HELD_OUT]
        if not held_out:
            raise ConfigError(
                f"--calibration: {file or OWN} gives {len(texts)} texts of more than one token, and {HELD_OUT} are "
                "needed: one of them is held out"
            )
        if (most := max(map(max, texts))) >= vocab_size:
            raise ConfigError(f"MODEL: its tokenizer gives token {most}, the model knows those below {vocab_size}")
        others = [text for number, text in enumerate(texts, 1) if number % HELD_OUT]
        return cls(others[:samples], held_out)


class _Reader:
    """One file, by one model's tokenizer."""

    def __init__(self, directory: Path, length: int, file: Path) -> None:
        self._tokenizer = Tokenizer.from_directory(directory)
        self._template = ChatTemplate.from_directory(directory, self._tokenizer)
        self._file, self._length = file, length

    def texts(self, wanted: int) -> list[list[int]]:
        """So many of those that the file holds."""
        try:
            if self._file.suffix.lower() == ".jsonl":
                return [self._line(number, line) for number, line in _spread(list(self._lines()), wanted)]
            return self._pieces(wanted)
        except OSError as error:
            raise ConfigError(f"--calibration: cannot read {self._file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--calibration: {self._file} is not UTF-8") from None

    def _lines(self) -> Iterator[tuple[int, str]]:
        with self._file.open(encoding="utf-8") as opened:
            yield from ((number, line) for number, line in enumerate(islice(opened, MOST_LINES), 1) if line.strip())

    def _line(self, number: int, line: str) -> list[int]:
        """An object with `text`, or `messages` and perhaps the answer `expected`."""
        try:
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("text"), str):
                return self._ids(row["text"], add_special_tokens=True)
            if isinstance(row, dict) and isinstance(row.get("messages"), list):
                return self._chat(row)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"--calibration: {self._file}:{number}: {error}") from None
        raise ConfigError(f"--calibration: {self._file}:{number}: expected an object with text or messages")

    def _chat(self, row: dict[str, Any]) -> list[int]:
        """The conversation as the model's template has it; without one that takes it, message below message."""
        messages = list(row["messages"])
        if isinstance(row.get("expected"), str):
            messages.append({"role": "assistant", "content": row["expected"]})
        try:
            text = self._template.render(messages, tools=row.get("tools"), add_generation_prompt=False)
            return self._ids(text, add_special_tokens=False)
        except InvalidRequestError:
            text = "\n".join(str(message.get("content") or "") for message in messages)
            return self._ids(text, add_special_tokens=True)

    def _pieces(self, wanted: int) -> list[list[int]]:
        """A text from its beginning, in pieces."""
        with self._file.open(encoding="utf-8") as opened:
            text = opened.read(wanted * self._length * _CHARS_PER_TOKEN)
        ids = self._tokenizer.encode(text, add_special_tokens=False)[: wanted * self._length]
        return [ids[start : start + self._length] for start in range(0, len(ids), self._length)]

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = text[: self._length * _CHARS_PER_TOKEN]
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)[: self._length]


def _spread(lines: list[tuple[int, str]], wanted: int) -> list[tuple[int, str]]:
    """So many of them, from all over the file."""
    if len(lines) <= wanted:
        return lines
    return [lines[number * len(lines) // wanted] for number in range(wanted)]
