"""Sparse vectors over HTTP; sentence-transformers' SparseEncoder is the judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from sentence_transformers import SparseEncoder

from tests.api.pooling_engines import PoolingEngines
from tests.models.test_vocabulary import ASKED, written


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SparseEncoder]:
    return written("bert", tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def client(model: tuple[Path, SparseEncoder]) -> Iterator[PoolingEngines]:
    engines = PoolingEngines({"sparse": model[0]})
    yield engines
    engines.shutdown()


def test_entries_and_scores(http: httpx.Client, model: tuple[Path, SparseEncoder]) -> None:
    expected = model[1].encode(ASKED, convert_to_sparse_tensor=False).numpy()
    answer = http.post("/v1/embeddings", json={"model": "sparse", "input": ASKED, "encoding_format": "sparse"}).json()
    for entry, vector in zip(answer["data"], expected, strict=True):
        indices, values = entry["embedding"]["indices"], entry["embedding"]["values"]
        assert indices == np.flatnonzero(vector).tolist()
        np.testing.assert_allclose(values, vector[indices], atol=1e-4)
    scores = http.post("/v1/score", json={"model": "sparse", "text_1": ASKED[0], "text_2": ASKED[1:]}).json()["data"]
    np.testing.assert_allclose([one["score"] for one in scores], expected[1:] @ expected[0], rtol=1e-4)
