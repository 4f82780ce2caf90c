"""A random tiny Jina Reranker v3 as published, and what its authors' code computes of it, in one prompt or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, Qwen3Model

from tests.tiny_rerankers import written

MARKS = ("<|embed_token|>", "<|rerank_token|>")
SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking."
)
BLOCK = 125


def published(directory: Path) -> Path:
    """Writes the checkpoint."""
    written(directory, tied=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = load_file(directory / "model.safetensors")
    torch.manual_seed(7)
    size = weights["model.embed_tokens.weight"].shape[1]
    for name in ("model.embed_tokens.weight",):
        weights[name] = torch.cat([weights[name], torch.randn(len(MARKS), size)])
    weights |= {"projector.0.weight": torch.randn(size // 2, size), "projector.2.weight": torch.randn(512, size // 2)}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    config = json.loads(file.read_text())
    own = {
        "architectures": ["JinaForRanking"],
        "vocab_size": config["vocab_size"] + 2,
        "max_position_embeddings": 16384,
    }
    file.write_text(json.dumps(config | own))
    return directory


class Judge:
    """transformers' Qwen 3 and two matrices."""

    def __init__(self, directory: Path) -> None:
        self.model = Qwen3Model.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.weights = load_file(directory / "model.safetensors")

    def scores(self, query: str, documents: Sequence[str], instruction: str | None = None) -> list[float]:
        """Of all documents, 125 in a prompt."""
        found, queries, weights = [], [], []
        for at in range(0, len(documents), BLOCK):
            rows, asked = self.vectors(query, documents[at : at + BLOCK], instruction)
            found.append(rows)
            queries.append(asked)
            weights.append(((1 + F.cosine_similarity(rows, asked[None])) / 2).max())
        mean = sum(weight * one for weight, one in zip(weights, queries, strict=True)) / sum(weights)
        return F.cosine_similarity(torch.cat(found), mean[None]).tolist()

    def vectors(self, query: str, documents: Sequence[str], asked: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the documents' marks and the query's."""
        instruct = f"<instruct>\n{asked}\n</instruct>\n" if asked else ""
        passages = "".join(f'<passage id="{i}">\n{text}{MARKS[0]}\n</passage>\n' for i, text in enumerate(documents))
        prompt = (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nI will provide you with {len(documents)} "
            "passages, each indicated by a numerical identifier. Rank the passages based on their relevance to query: "
            f"{query}\n{instruct}{passages}<query>\n{query}{MARKS[1]}\n</query><|im_end|>\n<|im_start|>assistant\n"
            "<think>\n\n</think>\n\n"
        )
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        marks = [self.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS]
        with torch.inference_mode():
            hidden = self.model(ids).last_hidden_state[0]
        projected = F.relu(hidden @ self.weights["projector.0.weight"].T) @ self.weights["projector.2.weight"].T
        return projected[ids[0] == marks[0]], projected[ids[0] == marks[1]][0]
