"""Texts marked, cut and lengthened; the rules are written out here, vectors are compared in tests/api/pooling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.errors import ConfigError
from app.records.late_interaction import ExpandedQuery, LateInteraction, QueryExpansion
from app.text.late_prompts import late_prompts
from app.text.tokenizer import Tokenizer
from tests.tiny_encoders import tiny_encoder

LATE = LateInteraction(
    document_length=6,
    expansion=QueryExpansion(9),
    skipped=(".", "no such token"),
    marks=(("query", "[MASK] "), ("document", "no mark of the vocabulary ")),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(tiny_encoder("bert"))


def test_queries_are_marked_and_lengthened(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("fish . boat")
    mask = tokenizer.token_to_id("[MASK]")
    one = late_prompts(tokenizer, LATE, ["fish . boat"], "query")[0]
    assert one.token_ids == [plain[0], mask, *plain[1:], *[mask] * (9 - len(plain) - 1)]
    assert one.asks == (ExpandedQuery(len(plain) + 1),)
    assert one.kept == (True,) * 9
    longer = late_prompts(tokenizer, LATE, ["fish " * 20], "query")[0]
    assert len(longer.token_ids) == 9
    assert longer.asks == ()


def test_documents_are_cut_and_lose_tokens(tokenizer: Tokenizer) -> None:
    late = LateInteraction(document_length=6, skipped=LATE.skipped)
    short, long = late_prompts(tokenizer, late, ["fish . boat", "fish . " * 9], "document")
    assert short.token_ids == tokenizer.encode("fish . boat")
    assert short.kept == (True, True, False, True, True)
    assert len(long.token_ids) == 6
    assert len(late_prompts(tokenizer, late, ["fish . " * 9], "document", limit=4)[0].token_ids) == 4
    vectors = np.arange(10, dtype=np.float32).reshape(5, 2)
    assert short.counted(vectors)[:, 0].tolist() == [0, 2, 6, 8]


def test_a_mark_that_is_no_token_is_text(tokenizer: Tokenizer) -> None:
    late = LateInteraction(marks=(("document", "no mark "),))
    assert late_prompts(tokenizer, late, ["fish"], "document")[0].token_ids == tokenizer.encode("no mark fish")


def test_a_tokenizer_without_the_filler_is_refused(tokenizer: Tokenizer) -> None:
    late = LateInteraction(expansion=QueryExpansion(9, token="no such token"))
    with pytest.raises(ConfigError, match="lengthens"):
        late_prompts(tokenizer, late, ["fish"], "query")


def test_scores_are_those_of_every_pair_of_vectors() -> None:
    query, document = torch.randn(2500, 8).numpy(), torch.randn(70, 8).numpy()
    products = np.array([[float(a @ b) for b in document] for a in query[::50]])
    small = LATE.score(query[::50], document)
    assert small == pytest.approx(products.max(axis=1).sum(), rel=1e-5)
    assert LATE.score(query, document) == pytest.approx((query @ document.T).max(axis=1).sum(), rel=1e-5)
    mean = LateInteraction(is_mean=True)
    assert mean.score(query[::50], document) == pytest.approx(products.max(axis=1).mean(), rel=1e-5)
    assert LATE.score(query, document[:0]) == 0.0
