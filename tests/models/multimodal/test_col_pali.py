"""ColPali in transformers' layout: prompts of pages and queries, their vectors and scores are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ColPaliConfig, ColPaliForRetrieval, ColPaliProcessor, PreTrainedTokenizerFast
from transformers.models.siglip import SiglipImageProcessorPil

from app import LLM
from app.checkpoints.model_info import ModelInfo
from app.errors import InvalidRequestError, UnsupportedError
from app.models.multimodal.col_pali import ColPaliForRetrieval as Ours
from tests.media.pictures import picture
from tests.tiny_media import EYES

SPECIAL = ["<pad>", "<eos>", "<bos>", "<image>"]
QUERIES = ["which page?", "a much longer question about tables and figures", "x"]
SIZE = {"size": {"height": 16, "width": 16}}
TEXT = {
    **{"model_type": "gemma", "vocab_size": 260, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512},
    **{"pad_token_id": 256, "eos_token_id": 257, "bos_token_id": 258},
}


def written(path: Path) -> tuple[ColPaliForRetrieval, ColPaliProcessor]:
    """Writes a random model; its tokenizer begins texts by itself, which transformers' processor of pages rules out."""
    path.mkdir()
    inner = {
        **{"model_type": "paligemma", "text_config": TEXT, "image_token_index": 259, "projection_dim": 64},
        "vision_config": {**EYES, "model_type": "siglip_vision_model", "vision_use_head": False},
    }
    torch.manual_seed(0)
    judge = ColPaliForRetrieval(ColPaliConfig(vlm_config=inner, embedding_dim=24)).eval()
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    judge.save_pretrained(path)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.image_token, tokenizer.image_token_id = "<image>", 259
    pages = SiglipImageProcessorPil(**SIZE)
    pages.image_seq_length = 16
    backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 258)])
    backend.save(str(path / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (path / "tokenizer_config.json").write_text(json.dumps(own))
    (path / "preprocessor_config.json").write_text(json.dumps(SIZE))
    return judge, ColPaliProcessor(pages, tokenizer)


def vectors(judge: ColPaliForRetrieval, inputs: Any) -> tuple[list[int], np.ndarray[Any, Any]]:
    """transformers' tokens and [T, E] of the one prompt in `inputs`."""
    with torch.inference_mode():
        found = judge(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False)
    return inputs["input_ids"][0].tolist(), found.embeddings[0].numpy()


def test_vectors_and_scores(tmp_path: Path) -> None:
    judge, processor = written(tmp_path / "model")
    images = [picture(30, 20), picture(16, 16, seed=1)]
    with LLM(str(tmp_path / "model"), device="cpu", num_threads=1, max_num_seqs=4) as llm:
        pages: list[Any] = [{"prompt": "", "multi_modal_data": {"image": image}} for image in images]
        found = llm.encode([pages[0], "a page in words", pages[1]], use_tqdm=False)
        for image, one in zip(images, found[::2], strict=True):
            ids, expected = vectors(judge, processor.process_images(images=[image]))
            assert one.prompt_token_ids == ids
            np.testing.assert_allclose(one.outputs.data, expected, atol=1e-4)
        scores = [one.outputs.score for one in llm.score(QUERIES, ["a page in words"] * 3, use_tqdm=False)]
        for query, score in zip(QUERIES, scores, strict=True):
            ids, own = vectors(judge, processor.process_queries(text=[query]))
            made = llm.score(query, "a page in words", use_tqdm=False)[0].prompt_token_ids
            assert made == ids + found[1].prompt_token_ids
            np.testing.assert_allclose(score, (own @ found[1].outputs.data.T).max(1).sum(), rtol=1e-4)
        with pytest.raises(InvalidRequestError, match="a text or a picture, not 1 pictures beside 3"):
            llm.encode({"prompt": "and", "multi_modal_data": {"image": images[0]}}, use_tqdm=False)


def test_newer_names_of_tensors(tmp_path: Path) -> None:
    judge, processor = written(tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("vlm.language_model.model.layers.0.") for name in tensors)
    renamed = {name.replace("language_model.model.", "language_model."): one for name, one in tensors.items()}
    head = tensors["vlm.language_model.model.embed_tokens.weight"].clone()
    save_file({**renamed, "vlm.language_model.lm_head.weight": head}, file, {"format": "pt"})
    with LLM(str(tmp_path / "model"), device="cpu", num_threads=1) as llm:
        page: Any = {"prompt": "", "multi_modal_data": {"image": picture(30, 20)}}
        (found,) = llm.encode(page, use_tqdm=False)
    _, expected = vectors(judge, processor.process_images(images=[picture(30, 20)]))
    np.testing.assert_allclose(found.outputs.data, expected, atol=1e-4)


def test_over_another_model_it_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "model")
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    config["vlm_config"]["text_config"]["model_type"] = "gemma2"
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="over a model of types"):
        Ours.family_of(ModelInfo.from_directory(str(tmp_path / "model")))
