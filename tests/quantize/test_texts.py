"""Which texts a calibration reads, and what is said of those that it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.checkpoints.model_info import ASSETS
from app.errors import ConfigError
from app.quantize.texts import Texts
from app.text.tokenizer import Tokenizer

MODEL = ASSETS / "tiny-chat"


def read(file: Path | None, samples: int = 100, length: int = 64) -> Texts:
    return Texts.read(file, MODEL, samples, length, 1024)


def test_every_fourth_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"Text number {n}."}) + "\n" for n in range(40)))
    texts, tokenizer = read(file), Tokenizer.from_directory(MODEL)
    found = [[tokenizer.decode(text) for text in part] for part in (texts.calibration, texts.held_out)]
    assert found[1] == [f"Text number {n}." for n in range(3, 40, 4)]
    assert sorted(found[0] + found[1]) == sorted(f"Text number {n}." for n in range(40))
    few = read(file, samples=3)
    assert [len(few.calibration), len(few.held_out)] == [3, 1]
    assert tokenizer.decode(few.held_out[0]) == "Text number 30."  # from all over the file
    assert all(len(text) <= 3 for text in read(file, length=3).calibration)


def test_conversations_and_plain_text(tmp_path: Path) -> None:
    own = read(None, samples=20)
    assert [len(own.calibration), len(own.held_out)] == [20, 6]
    tokenizer = Tokenizer.from_directory(MODEL)
    assert "<|im_start|>" in tokenizer.decode(own.calibration[0], skip_special_tokens=False)
    file = tmp_path / "long.txt"
    file.write_text("One two three four five. " * 400)
    pieces = read(file, samples=6, length=20)
    assert [len(pieces.calibration), len(pieces.held_out)] == [6, 2]
    assert {len(text) for text in (*pieces.calibration, *pieces.held_out)} == {20}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*: No such file"),
        ("{", r"texts\.jsonl:1: "),
        ('{"text": "a good line"}\n\n{"prompt": "x"}', r"texts\.jsonl:3: expected an object with text or messages"),
        ('{"messages": [3]}', r"texts\.jsonl:1: "),
        ('{"a":' * 100_000, r"texts\.jsonl:1: maximum recursion"),
        ('{"text": "only one"}', "gives 1 texts of more than one token, and 4 are needed"),
        ("", "gives 0 texts"),
    ],
)
def test_errors_name_the_option_and_the_line(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "texts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--calibration: .*{message}"):
        read(file)
