"""CLIP and SigLIP: vectors of texts and pictures, alone and side by side in a step, are transformers'."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel

from app import LLM
from app.errors import InvalidRequestError
from tests.media.pictures import picture
from tests.tiny_media import EYES
from tests.tiny_models import _root

TEXTS = ["a cat", "two dogs and a bird", "x"]
TEXT = {
    **{"vocab_size": 259, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"max_position_embeddings": 32, "bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258},
}
KINDS: dict[str, dict[str, Any]] = {
    "clip": {"projection_dim": 40, "text_config": TEXT, "vision_config": EYES},
    "siglip": {
        "text_config": {**TEXT, "projection_size": 32, "hidden_act": "gelu_pytorch_tanh"},
        "vision_config": EYES,
    },
}


@functools.cache
def tiny_towers(kind: str) -> Path:
    """Directory of a random model with a tokenizer of bytes."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **KINDS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_root()))
    model.save_pretrained(path)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|pad|>", "<|begin|>", "<|end|>"])
    begin = "<|begin|> " if kind == "clip" else ""
    tokens = [(name, backend.token_to_id(name)) for name in ("<|begin|>", "<|end|>")]
    backend.post_processor = processors.TemplateProcessing(f"{begin}$A <|end|>", special_tokens=tokens)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    own = {"size": {"height": 16, "width": 16}, "do_center_crop": False, "resample": 3}
    (path / "preprocessor_config.json").write_text(json.dumps(own))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(kind: str) -> None:
    path = tiny_towers(kind)
    judge = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    images = [picture(30, 20), picture(16, 16, seed=1), picture(9, 40, seed=2)]
    prompts: list[Any] = [{"prompt": "", "multi_modal_data": {"image": image}} for image in images]
    with LLM(str(path), device="cpu", num_threads=1, max_num_seqs=4) as llm:
        mixed = [prompts[0], TEXTS[0], TEXTS[1], prompts[1], prompts[2], TEXTS[2]]
        found = [np.asarray(one.outputs.embedding) for one in llm.embed(mixed, use_tqdm=False)]
        ids = [llm.tokenizer.encode(text, True) for text in TEXTS]
        with pytest.raises(InvalidRequestError, match="a text or a picture, not 1 pictures beside 3"):
            llm.embed({"prompt": "and", "multi_modal_data": {"image": images[0]}}, use_tqdm=False)
    if kind == "siglip":
        ids = [one + [258] * (32 - len(one)) for one in ids]
    module = __import__(f"transformers.models.{kind}", fromlist=["x"])
    processor = getattr(module, {"clip": "CLIPImageProcessorPil", "siglip": "SiglipImageProcessorPil"}[kind])
    own = {"size": {"height": 16, "width": 16}, "do_center_crop": False, "resample": 3}
    with torch.inference_mode():
        seen = processor(**own)(images, return_tensors="pt")["pixel_values"]
        vision = judge.get_image_features(pixel_values=seen).pooler_output
        text = torch.cat([judge.get_text_features(input_ids=torch.tensor([one])).pooler_output for one in ids])
    expected = [vision[0], text[0], text[1], vision[1], vision[2], text[2]]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, torch.nn.functional.normalize(theirs, dim=0).numpy(), atol=1e-4)
        assert np.ptp(ours) > 0.05
