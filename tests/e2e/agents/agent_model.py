"""A random model with a long context, a vocabulary of a size that programs meet, and answers that are known beforehand.

Its layers are random and so is what it says, up to an end that comes soon. Where its chat template finds that a known
answer is due, it lets the prompt end in a token of this answer's own, and from there each token has one successor: a
share of the hidden state that the layers leave alone holds the place in the answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

from benchmarks.serve_process import ROOT
from tests.tiny_models import hf_model, tiny_model

VOCAB_SIZE = 32_768
MAX_LEN = 131_072
HIDDEN = 192
PLACES = HIDDEN // 2  # of the hidden state, which the layers leave alone; the last one says that no answer is known
MOST_PIECES = 10  # tokens of a known answer
MEAN_TOKENS = 20.0  # of an answer that is not known
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def write_model(path: Path, answers: Mapping[str, str], template: str) -> Path:
    """Write it to `path`. Where `template` ends a prompt with `start_of(name)`, it answers `answers[name]`."""
    chains = _write_tokenizer(path, answers)
    size: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "max_position_embeddings": MAX_LEN}
    end: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    model = hf_model(tiny_model(**size, **end))
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        _say(model, chains, end=2)
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    named = {"eos_token": TURN_END, "pad_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps({**named, "model_max_length": MAX_LEN}))
    (path / "chat_template.jinja").write_text(template)
    return path


def start_of(name: str) -> str:
    """The token that begins a known answer."""
    return f"<|answer:{name}|>"


def _write_tokenizer(path: Path, answers: Mapping[str, str]) -> list[list[int]]:
    """A byte-level vocabulary of our own sources, filled up; returns the ids of each answer, its beginning first."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    special = [END, TURN, TURN_END, *map(start_of, answers)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1024,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(), trainer)
    state = json.loads(backend.to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    # No merge leads to the pieces and to what fills up: they are never in a prompt.
    pieces = {name: _pieces(name, answer, split, vocab) for name, answer in answers.items()}
    while len(vocab) < VOCAB_SIZE:
        vocab[f"filler{len(vocab)}"] = len(vocab)
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(state))
    return [[vocab[start_of(name)], *ids] for name, ids in pieces.items()]


def _pieces(name: str, answer: str, split: pre_tokenizers.ByteLevel, vocab: dict[str, int]) -> list[int]:
    """Adds the answer to the vocabulary in pieces that are nowhere else in it."""
    text = "".join(part for part, _ in split.pre_tokenize_str(answer))
    ids, begin, size = [], 0, math.ceil(len(text) / MOST_PIECES)
    while begin < len(text):
        end = begin + size
        while text[begin:end] in vocab:
            assert end < len(text), f"the answer {name!r} ends as another does"
            end += 1
        ids.append(vocab.setdefault(text[begin:end], len(vocab)))
        begin = end
    return ids


def _corpus() -> Iterable[str]:
    for folder in ("app", "docs", "tests"):
        for file in sorted((ROOT / folder).rglob("*.*")):
            if file.suffix in (".py", ".md", ".json"):
                yield file.read_text()


def _say(model: LlamaForCausalLM, chains: list[list[int]], end: int) -> None:
    """Change the weights: each token of a chain has the next one as its successor, the others end after a while."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:PLACES] = 0
        layer.mlp.down_proj.weight[:PLACES] = 0
    model.model.norm.weight[:PLACES] = 1
    embedding[:, :PLACES], head[:, :PLACES] = 0, 0
    embedding[:, PLACES - 1] = 1
    place = 0
    for chain in chains:
        for token, successor in zip(chain, [*chain[1:], end], strict=True):
            assert place < PLACES - 1, "too many tokens for the places of the hidden state"
            embedding[token], head[token, PLACES:] = 0, 0
            embedding[token, place] = 1e4  # whatever the layers add
            head[successor, place] = 20
            place += 1
    ids = torch.arange(300, 364)[None]
    hidden: torch.Tensor = model.model(ids).last_hidden_state[0]  # [64, HIDDEN]
    others = (hidden @ head.T).logsumexp(-1)  # [64]
    head[end, PLACES:] = 0
    head[end, PLACES - 1] = ((others - math.log(MEAN_TOKENS)) / hidden[:, PLACES - 1]).mean()
