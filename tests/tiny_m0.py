"""A random tiny Jina Reranker m0 as published, and what transformers' Qwen2-VL and two linear layers say of its
prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from app.text.model_media import ModelMedia
from app.text.tokenizer import Tokenizer
from tests.chatting_media import TEXT_TEMPLATE, ask_of, chatting_media_model
from tests.tiny_media import IMAGE, MODELS, media_judge

SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
SCORED = 100  # the token whose state is read


def prompt(query: str, document: str) -> str:
    return f"**Document**:\n{document}\n**Query**:\n{query}"


def published(directory: Path) -> Path:
    """Writes the checkpoint; its chat template would show any role, as Qwen2-VL's does."""
    chatting_media_model("qwen2_vl", directory)
    file = directory / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("lm_head.")}
    torch.manual_seed(5)
    weights |= {"score.0.weight": torch.randn(64, 64) * 0.3, "score.0.bias": torch.randn(64) * 0.3}
    weights |= {"score.2.weight": torch.randn(1, 64) * 0.3, "score.2.bias": torch.randn(1) + 2.65}
    config = json.loads((directory / "config.json").read_text()) | {"architectures": ["JinaVLForRanking"]}
    for name in ("model.safetensors", "config.json"):
        (directory / name).unlink()  # a link to what other tests share
    save_file(weights, file, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEXT_TEMPLATE)
    return directory


class Judge:
    """Scores of prompts with pictures; `plain` is a directory for the model without its head."""

    def __init__(self, directory: Path, plain: Path) -> None:
        self.directory = directory
        self.model = media_judge(chatting_media_model("qwen2_vl", plain))
        self.weights = load_file(directory / "model.safetensors")
        self.tokenizer = Tokenizer.from_directory(directory)

    def score(self, text: str, media: ModelMedia | None = None, files: Sequence[bytes] = ()) -> float:
        """Of a prompt, whose placeholders are those of the files."""
        pieces = text.split("<|image_pad|>")
        ids = self.tokenizer.encode(pieces[0], False)
        items = []
        for file, piece in zip(files, pieces[1:], strict=True):
            assert media is not None
            count = media.read("image", file).layout.num_tokens
            ids += [IMAGE] * count + self.tokenizer.encode(piece, False)
            items += ask_of(self.directory, [IMAGE] * count, file).items
        tokens = torch.tensor([[*ids, SCORED]])
        seen = MODELS["qwen2_vl"].judge(items) if items else {}
        types = (tokens == IMAGE).int()
        with torch.inference_mode():
            states = self.model.model(input_ids=tokens, mm_token_type_ids=types, use_cache=False, **seen)
        layers = [(self.weights[f"score.{i}.weight"], self.weights[f"score.{i}.bias"]) for i in (0, 2)]
        state = F.relu(F.linear(states.last_hidden_state[0, -1], *layers[0]))
        return float(torch.sigmoid(F.linear(state, *layers[1]) - 2.65))
