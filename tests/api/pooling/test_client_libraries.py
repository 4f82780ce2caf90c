"""Clients for embeddings and reranking, unchanged: OpenAI's, Cohere's, LangChain, LlamaIndex, Haystack.
sentence-transformers is the judge."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.api.conftest import Server
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import add_modules, texts, tiny_encoder

ASKED = texts(5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    embed = tmp_path_factory.mktemp("clients") / "model"
    shutil.copytree(tiny_encoder("bert"), embed)
    add_modules(embed)
    return {"embed": embed, "rerank": tiny_encoder("bert", 1)}


@pytest.fixture(scope="module")
def client(models: dict[str, Path]) -> Iterator[PoolingEngines]:
    engines = PoolingEngines(dict(models))
    yield engines
    engines.shutdown()


@pytest.fixture(scope="module")
def vectors(models: dict[str, Path]) -> Any:
    return SentenceTransformer(str(models["embed"]), device="cpu").encode(ASKED)


def test_openai(server: Server, vectors: Any) -> None:
    """Its embeddings come as base64 unless asked otherwise."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        for form in ({}, {"encoding_format": "float"}):
            found = sdk.embeddings.create(model="embed", input=ASKED, **form)  # type: ignore[arg-type]
            np.testing.assert_allclose([one.embedding for one in found.data], vectors, atol=1e-5)
        assert found.usage.prompt_tokens > len(ASKED)


def test_cohere(server: Server, vectors: Any, models: dict[str, Path]) -> None:
    import cohere

    sdk = cohere.ClientV2(api_key="none", base_url=server.url)
    found = sdk.embed(
        model="embed", texts=ASKED, input_type="search_document", embedding_types=["float", "int8", "binary"]
    ).embeddings
    np.testing.assert_allclose(found.float_, vectors, atol=1e-5)
    assert [len(one) for one in found.int8 or ()] == [48] * len(ASKED)
    assert [len(one) for one in found.binary or ()] == [6] * len(ASKED)
    ranked = sdk.rerank(model="rerank", query=ASKED[0], documents=ASKED[1:], top_n=3).results
    scores = CrossEncoder(str(models["rerank"]), device="cpu").predict([(ASKED[0], text) for text in ASKED[1:]])
    assert [one.index for one in ranked] == np.argsort(-scores)[:3].tolist()
    np.testing.assert_allclose([one.relevance_score for one in ranked], np.sort(scores)[::-1][:3], atol=1e-4)


def test_cohere_s_first_client(server: Server, vectors: Any) -> None:
    """As LangChain's CohereEmbeddings calls it: texts in batches, and the vectors as they come."""
    import cohere

    sdk = cohere.Client(api_key="none", base_url=server.url)
    plain = sdk.embed(model="embed", texts=ASKED, input_type="search_document", truncate="END")
    np.testing.assert_allclose(plain.embeddings, vectors, atol=1e-5)
    forms = sdk.embed(model="embed", texts=ASKED, input_type="search_document", embedding_types=["float"])
    found: Any = forms.embeddings
    np.testing.assert_allclose(found.float_, vectors, atol=1e-5)


def test_langchain(server: Server, vectors: Any) -> None:
    """Texts are sent as they are: OpenAI's tokens, which it would count them by, are of no use here."""
    from langchain_openai import OpenAIEmbeddings

    own: Any = {"api_key": "none", "check_embedding_ctx_length": False}
    embeddings = OpenAIEmbeddings(model="embed", base_url=f"{server.url}/v1", **own)
    np.testing.assert_allclose(embeddings.embed_documents(ASKED), vectors, atol=1e-5)
    np.testing.assert_allclose(embeddings.embed_query(ASKED[1]), vectors[1], atol=1e-5)


def test_llama_index(server: Server, vectors: Any) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embeddings = OpenAILikeEmbedding(model_name="embed", api_base=f"{server.url}/v1", api_key="none")
    np.testing.assert_allclose(embeddings.get_text_embedding_batch(ASKED), vectors, atol=1e-5)
    np.testing.assert_allclose(embeddings.get_query_embedding(ASKED[1]), vectors[1], atol=1e-5)


def test_haystack(server: Server, vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    own: Any = {"api_key": Secret.from_token("none"), "api_base_url": f"{server.url}/v1", "model": "embed"}
    found = OpenAIDocumentEmbedder(progress_bar=False, **own).run([Document(content=text) for text in ASKED])
    np.testing.assert_allclose([one.embedding for one in found["documents"]], vectors, atol=1e-5)
    np.testing.assert_allclose(OpenAITextEmbedder(**own).run(ASKED[1])["embedding"], vectors[1], atol=1e-5)


def test_haystack_ranks(server: Server, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.cohere import CohereRanker

    ranker = CohereRanker(model="rerank", top_k=3, api_key=Secret.from_token("none"), api_base_url=server.url)
    found = ranker.run(query=ASKED[0], documents=[Document(content=text) for text in ASKED[1:]])["documents"]
    scores = CrossEncoder(str(models["rerank"]), device="cpu").predict([(ASKED[0], text) for text in ASKED[1:]])
    assert [one.content for one in found] == [ASKED[1:][i] for i in np.argsort(-scores)[:3]]
    np.testing.assert_allclose([one.score for one in found], np.sort(scores)[::-1][:3], atol=1e-4)
