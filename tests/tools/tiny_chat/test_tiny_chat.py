# ruff: noqa: PT018
"""The generator, the template and the checker of the built-in model (no training here)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from app.quantize.questions import is_right
from tools.tiny_chat import card, evaluate, families, template, words

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "app" / "assets" / "tiny-chat"


@pytest.fixture(scope="module")
def tok():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def test_training_and_heldout_parts_are_disjoint():
    rng = random.Random(0)
    for _ in range(300):
        train, test = families.addition(rng, False), families.addition(rng, True)
        for ex, want in ((train, False), (test, True)):
            a, b = (int(x) for x in ex.thought.splitlines()[-1].split(" = ")[0].split(" + "))
            assert words.held(f"add:{min(a, b)}:{max(a, b)}") is want
        assert words.held("name:" + words.name(rng, True)) and not words.held("name:" + words.name(rng, False))


def test_every_family_makes_examples_that_its_own_answer_passes():
    rng = random.Random(1)
    for fam in families.EVAL_FAMILIES:
        for _ in range(20):
            ex = families.heldout(fam, rng)
            if ex["check"] == "tool_call":
                text = template.answer_text({"content": "", "tool_calls": [{"function": c} for c in ex["expected"]]})
            else:
                text = ex["expected"][0] if ex["check"] == "one_of" else ex["expected"]
            assert is_right(ex, text), (fam, ex)
            assert is_right(ex, "steps\n</think>\n\n" + text)
            assert not is_right(
                ex,
                text + " x y z"
                if ex["check"] != "tool_call"
                else text.replace('"arguments": {', '"arguments": {"zz": 1, '),
            )


def test_template_renders_what_training_saw(tok):
    rng = random.Random(2)
    for _ in range(150):
        msgs, tools, open_think = families.conversation(rng)
        parts = template.pieces(msgs, tools, open_think)
        text = tok.apply_chat_template(msgs, tools=tools, tokenize=False)
        assert text == "".join(t for t, _ in parts)
        ids = [i for t, _ in parts for i in tok(t, add_special_tokens=False)["input_ids"]]
        assert ids == tok(text, add_special_tokens=False)["input_ids"]
        assert tok.decode(ids) == text


def test_template_options(tok):
    msgs = [{"role": "user", "content": "Hi"}]
    render = tok.apply_chat_template
    assert (
        render(msgs, tokenize=False, add_generation_prompt=True)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(msgs, tokenize=False, add_generation_prompt=True, enable_thinking=True).endswith(
        "<|im_start|>assistant\n<think>\n"
    )
    old = [
        *msgs,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "Bye"},
    ]
    assert "hm" not in render(old, tokenize=False) and "assistant\nHello<|im_end|>" in render(old, tokenize=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert render(parts, tokenize=False) == render(msgs, tokenize=False)
    as_text = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    as_dict = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert render([*msgs, as_text], tokenize=False) == render([*msgs, as_dict], tokenize=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in render([*msgs, as_text], tokenize=False)


def test_tokenizer_shows_digits_and_letters(tok):
    assert tok.tokenize("1234") == list("1234")
    assert tok.tokenize('"planet"')[1:-1] == list("planet")
    for text in ("naïve café 😀 日本", "a\tb\r\n  c", "<|im_end|> x"):
        assert tok.decode(tok(text, add_special_tokens=False)["input_ids"]) == text
    assert tok.eos_token_id == 2 and tok.pad_token_id == 0 and len(tok) == 1024


def test_assets_fit_their_limits():
    config = json.loads((MODEL / "config.json").read_text())
    draft = MODEL.parent / "tiny-chat-draft"
    assert config["vocab_size"] == json.loads((draft / "config.json").read_text())["vocab_size"] == 1024
    assert config["max_position_embeddings"] >= 2048
    assert sum(f.stat().st_size for f in MODEL.iterdir()) < 10_000_000
    assert sum(f.stat().st_size for f in draft.iterdir()) < 1_000_000


def test_heldout_file():
    rows = evaluate.load_heldout()
    assert {r["family"] for r in rows} == set(families.EVAL_FAMILIES)
    for r in rows:
        assert r["messages"][-1]["role"] in ("user", "tool") and r["check"] in ("exact", "one_of", "json", "tool_call")


def test_the_card_is_what_its_writer_writes(monkeypatch, tmp_path):
    folder = tmp_path / "tiny-chat"
    folder.mkdir()
    (folder / "metrics.json").write_bytes((MODEL / "metrics.json").read_bytes())
    monkeypatch.setattr(card, "BIG", folder)
    card.write_card()
    assert (folder / "README.md").read_text() == (MODEL / "README.md").read_text()
