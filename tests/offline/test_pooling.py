"""LLM.embed, score, classify and encode; transformers is the judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from transformers import AutoTokenizer

from app.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from app.offline.llm import LLM
from app.offline.pooling import _ahead
from app.records.pooling_params import PoolingParams
from tests.tiny_encoders import hf_encoder, texts, tiny_encoder
from tests.tiny_late_models import written

TEXTS = texts(7)


@pytest.fixture(scope="module")
def embed() -> Iterator[LLM]:
    with LLM(str(tiny_encoder("qwen3")), num_threads=1, max_model_len=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def vectors() -> torch.Tensor:
    """transformers' last hidden states of TEXTS, at length 1."""
    model, tokenizer = hf_encoder(tiny_encoder("qwen3")), AutoTokenizer.from_pretrained(tiny_encoder("qwen3"))
    with torch.inference_mode():
        last = [model(tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state[0, -1] for text in TEXTS]
    return torch.nn.functional.normalize(torch.stack(last))


def test_embed(embed: LLM, vectors: torch.Tensor) -> None:
    ids = embed.tokenizer.encode(TEXTS[2])
    for prompts in (TEXTS, [*TEXTS[:2], {"prompt_token_ids": ids}, {"prompt": TEXTS[3]}, *TEXTS[4:]]):
        found = embed.embed(prompts, use_tqdm=False)
        np.testing.assert_allclose([output.outputs.embedding for output in found], vectors, atol=1e-5)
        assert found[2].prompt_token_ids == ids
    (one,) = embed.embed(ids, use_tqdm=False)
    np.testing.assert_allclose(one.outputs.embedding, vectors[2], atol=1e-5)


def test_scores_of_embeddings_are_cosines(embed: LLM, vectors: torch.Tensor) -> None:
    found = embed.score(TEXTS[0], TEXTS, use_tqdm=False)
    np.testing.assert_allclose([output.outputs.score for output in found], vectors @ vectors[0], atol=1e-5)


def test_encode_gives_every_token(embed: LLM, vectors: torch.Tensor) -> None:
    (found,) = embed.encode(TEXTS[0], use_tqdm=False)
    assert found.outputs.data.shape == (len(found.prompt_token_ids), 64)
    np.testing.assert_allclose(found.outputs.data[-1], vectors[0], atol=1e-5)
    (whole,) = embed.encode(TEXTS[0], PoolingParams(task="embed"), use_tqdm=False)
    np.testing.assert_allclose(whole.outputs.data, vectors[0], atol=1e-5)


def test_long_prompts_are_cut_only_when_asked(embed: LLM) -> None:
    long = " ".join(TEXTS * 3)
    with pytest.raises(PromptTooLongError, match=r"prompts\[1\]"):
        embed.embed(["a", long], use_tqdm=False)
    (cut,) = embed.embed(long, use_tqdm=False, truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == 128
    with pytest.raises(InvalidRequestError, match="at least 1"):
        embed.embed("a", truncate_prompt_tokens=0)


def test_a_prompt_at_fault_behind_many(embed: LLM) -> None:
    """Those before it may have been computed; the next call finds nothing of them."""
    with pytest.raises(InvalidRequestError, match=r"prompts\[300\]"):
        embed.embed([*([[5, 6, 7]] * 300), [10**9]], use_tqdm=False)
    assert len(embed.embed(TEXTS, use_tqdm=False)) == len(TEXTS)
    assert embed.embed([], use_tqdm=False) == []


@pytest.mark.parametrize("wrong", [5, {"text": "a"}])
def test_a_prompt_of_a_wrong_form_is_named(embed: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompts\[30\]: "):
        embed.embed([*(["a"] * 30), wrong, "a"], use_tqdm=False)


def test_a_prompt_is_made_beside_each_that_goes_out() -> None:
    made: list[int] = []

    def requests() -> Iterator[Any]:
        for i in range(100):
            made.append(i)
            yield i

    taken = _ahead(requests())
    for num_taken in range(1, 101):
        assert next(taken) == num_taken - 1
        assert len(made) == min(2 * num_taken, 100)


def test_what_a_model_cannot_do_is_refused(embed: LLM) -> None:
    with pytest.raises(UnsupportedError, match="classify"):
        embed.classify("a")
    with pytest.raises(UnsupportedError, match="generates no text"):
        embed.generate("a", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="data_1"):
        embed.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(InvalidRequestError, match="task"):
        embed.embed("a", PoolingParams(task="token_embed"))


def test_a_cross_encoder_scores_and_classifies() -> None:
    directory = tiny_encoder("bert", 1)
    model, tokenizer = hf_encoder(directory, classifies=True), AutoTokenizer.from_pretrained(directory)
    with LLM(str(directory), num_threads=1) as llm, torch.inference_mode():
        scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        expected = [model(**tokenizer(TEXTS[0], text, return_tensors="pt")).logits.sigmoid() for text in TEXTS[1:]]
        np.testing.assert_allclose([output.outputs.score for output in scores], torch.cat(expected)[:, 0], atol=1e-4)
        (classes,) = llm.classify(TEXTS[0], use_tqdm=False)
        alone = model(**tokenizer(TEXTS[0], return_tensors="pt")).logits.sigmoid()
        np.testing.assert_allclose(classes.outputs.probs, alone[0], atol=1e-4)


def test_scores_vector_by_vector(tmp_path: Path) -> None:
    directory = written("unseen", tmp_path)
    judge = MultiVectorEncoder(str(directory), device="cpu")
    documents = judge.encode_document(TEXTS)
    with LLM(str(directory), executor="in_process", num_threads=1, device="cpu") as llm:
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        vectors = llm.encode(TEXTS[:2], use_tqdm=False)
    expected = judge.similarity(judge.encode_query(TEXTS[:1]), documents)[0].numpy()
    np.testing.assert_allclose([one.outputs.score for one in scores], expected, atol=1e-4)
    before = judge.encode_document(TEXTS[:2])
    for ours, theirs in zip(vectors, before, strict=True):
        np.testing.assert_allclose(ours.outputs.data, theirs, atol=1e-4)
