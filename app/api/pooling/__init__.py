"""Vectors and scores instead of text: score, rerank, classify and pooling, in the shapes of vLLM, Jina and Cohere."""
