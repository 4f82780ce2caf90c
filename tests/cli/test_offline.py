"""`manta generate` and `manta run` over the engine in this process, judged by `LLM` and by the files they write."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Manta

# The least that the built-in model needs, so that tests start quickly.
SMALL = ("--max-model-len", 256, "--kv-cache-memory-bytes", 32 << 20, "--num-threads", 1)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_generate_answers(manta: Manta) -> None:
    done = manta("generate", "What is 3 + 4?", "Spell cat.", "--temperature", 0, *SMALL)
    assert done.code == 0
    assert "# What is 3 + 4?\n3 + 4 = 7." in done.out
    assert "# Spell cat.\n" in done.out


def test_generate_raw_and_standard_input(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"))
    done = manta("generate", "--raw", "--temperature", 0, "--stop", "=", "--include-stop-str-in-output", *SMALL)
    assert done.out == "3 + 4 =\n"


def test_run(manta: Manta, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts", tmp_path / "deep" / "out.jsonl"
    entries = [
        {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "id": "seven"},
        {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True},
        {
            "messages": [{"role": "user", "content": "What is 3 + 4?"}],
            "n": 2,
            "temperature": 1,
            "seed": 5,
            "max_tokens": 2,
        },
    ]
    file.write_text("What is 1 + 1?\n\n" + "".join(json.dumps(entry) + "\n" for entry in entries))
    done = manta("run", file, "-o", out, "--chat", "--temperature", 0, *SMALL)
    assert done.code == 0, done.err
    assert done.out == ""
    text, seven, ids, two = lines(out.read_text())
    assert text["outputs"][0]["text"] == "1 + 1 = 2."
    assert (seven["id"], seven["outputs"][0]["text"]) == ("seven", "3 + 4 = 7.")
    assert (ids["num_prompt_tokens"], ids["outputs"][0]["num_tokens"]) == (3, 3)
    assert ids["outputs"][0]["finish_reason"] == "length"
    assert [choice["index"] for choice in two["outputs"]] == [0, 1]
    assert (text["id"], ids["id"]) == (0, 3)  # lines without an id of their own are counted from 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a", "messages": []}', "give either prompt or messages"),
        ("{}", "give either prompt or messages"),
        ('{"prompt": 5}', "prompt: expected a text or token ids"),
        ('{"messages": "hi"}', "messages: expected a list"),
        ('{"prompt": "a"', "not JSON"),
        ('{"prompt": "a", "temprature": 1}', "SamplingParams has no parameter 'temprature'; did you mean temperature?"),
        ('{"prompt": "a", "temperature": -1}', "temperature: Input should be greater than or equal to 0"),
    ],
)
def test_a_wrong_line_is_named(manta: Manta, tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "prompts"
    file.write_text("fine\n" + line + "\n")
    mistake = manta("run", file).mistake
    assert mistake.startswith(f"{file}:2: ")
    assert says in mistake


def test_a_line_that_the_engine_refuses_is_named(manta: Manta, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("fine\n\n" + json.dumps({"prompt": [5] * 300}) + "\n")
    mistake = manta("run", file, *SMALL).mistake
    assert mistake.startswith(f"{file}:3: ")
    assert "300" in mistake


def test_an_empty_file(manta: Manta, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    assert "no prompts" in manta("run", tmp_path / "empty").mistake
    assert "empty prompt" in manta("generate", " ").mistake
