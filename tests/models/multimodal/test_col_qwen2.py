"""ColQwen2 in transformers' layout: vectors of pages and queries, and their scores, are transformers', at the positions
that the model was trained with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, ColQwen2Config, ColQwen2ForRetrieval

from app import LLM
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, InvalidRequestError, UnsupportedError
from app.models.multimodal.col_qwen2 import ColQwen2ForRetrieval as Ours
from app.records.pooling_info import PoolingInfo
from tests.chatting_media import ask_of, chatting_media_model
from tests.media.pictures import file_of, picture
from tests.tiny_media import IMAGE, MODELS

PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
QUERIES = ["which page?", "a much longer question about tables and figures", "x"]


def written(name: str, path: Path) -> ColQwen2ForRetrieval:
    """Writes a random model with a tokenizer and a processor."""
    chatting_media_model(name, path)
    inner = AutoConfig.for_model(MODELS[name].kind, **MODELS[name].config)
    torch.manual_seed(0)
    judge = ColQwen2ForRetrieval(ColQwen2Config(vlm_config=inner, embedding_dim=24)).eval()
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for file in (*path.glob("*.safetensors"), path / "config.json"):
        file.unlink()
    judge.save_pretrained(path)
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    return judge


def vectors(judge: ColQwen2ForRetrieval, ids: list[int], seen: dict[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    """transformers' [T, E]: its forward pass leaves positions of pictures out where nobody gives them."""
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        positions = None
        if seen:
            grid = seen["image_grid_thw"]
            positions, _ = judge.vlm.get_rope_index(tokens, (tokens == IMAGE).int(), image_grid_thw=grid)
            seen = {**seen, "pixel_values": seen["pixel_values"][None]}
        return judge(input_ids=tokens, position_ids=positions, use_cache=False, **seen).embeddings[0].numpy()  # type: ignore[no-any-return]


def with_older_names(path: Path, begin: str) -> None:
    """The tensors as earlier versions of transformers named them."""
    file = path / "model.safetensors"
    moved = {
        "vlm.language_model.": f"{begin}.",
        "vlm.visual.": "vlm.model.visual." if "language" in begin else "vlm.visual.",
    }
    tensors = load_file(file)
    for old, new in moved.items():
        tensors = {name.replace(old, new) if name.startswith(old) else name: value for name, value in tensors.items()}
    assert any(name.startswith(f"{begin}.layers.0.") for name in tensors)
    save_file({**tensors, "vlm.lm_head.weight": torch.zeros(8, 64)}, file, {"format": "pt"})


@pytest.mark.parametrize("begin", ["vlm.model", "vlm.model.language_model"])
def test_older_names_of_tensors(tmp_path: Path, begin: str) -> None:
    judge = written("qwen2_vl", tmp_path / "model")
    with_older_names(tmp_path / "model", begin)
    with LLM(str(tmp_path / "model"), device="cpu", num_threads=1, max_model_len=64) as llm:
        found = llm.encode("a page in words", use_tqdm=False)[0].outputs.data
        np.testing.assert_allclose(found, vectors(judge, llm.tokenizer.encode("a page in words"), {}), atol=1e-4)


@pytest.fixture(params=["qwen2_vl", "qwen2_5_vl"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path, ColQwen2ForRetrieval, LLM]]:
    path = tmp_path / "model"
    judge = written(request.param, path)
    options = {"device": "cpu", "num_threads": 1, "max_num_seqs": 4, "max_model_len": 256}
    with LLM(str(path), **options) as llm:
        yield request.param, path, judge, llm


def test_vectors_and_scores(model: tuple[str, Path, ColQwen2ForRetrieval, LLM]) -> None:
    name, path, judge, llm = model
    files = [file_of(picture(*size, seed=i)) for i, size in enumerate([(30, 20), (16, 16)])]
    pages: list[Any] = [{"prompt": "", "multi_modal_data": {"image": file}} for file in files]
    found = llm.encode([*pages, "a page in words"], use_tqdm=False)
    for file, one in zip(files, found, strict=False):
        ask = ask_of(path, one.prompt_token_ids, file)
        count = ask.items[0].length
        before, after = PAGE.split("<|image_pad|>")
        own = [*llm.tokenizer.encode(before, False), *[IMAGE] * count, *llm.tokenizer.encode(after, False)]
        assert one.prompt_token_ids == own
        expected = vectors(judge, own, MODELS[name].judge(ask.items))
        np.testing.assert_allclose(one.outputs.data, expected, atol=1e-4)
    words = llm.tokenizer.encode("a page in words")
    expected = vectors(judge, words, {})
    np.testing.assert_allclose(found[2].outputs.data, expected, atol=1e-4)
    asked = [llm.tokenizer.encode(f"Query: {text}{'<|im_end|>' * 10}\n") for text in QUERIES]
    scores = [one.outputs.score for one in llm.score(QUERIES, ["a page in words"] * 3, use_tqdm=False)]
    best = [(vectors(judge, ids, {}) @ expected.T).max(1).sum() for ids in asked]
    np.testing.assert_allclose(scores, best, rtol=1e-4)
    with pytest.raises(InvalidRequestError, match="a text or a picture, not 1 pictures beside 3"):
        llm.encode({"prompt": "and", "multi_modal_data": {"image": files[0]}}, use_tqdm=False)
    cut = llm.score("which page?" * 40, "x", use_tqdm=False, truncate_prompt_tokens=64)[0]
    end = llm.tokenizer.encode("<|im_end|>" * 10 + "\n")
    assert cut.prompt_token_ids[:64][-len(end) :] == end  # which is not cut off


def test_what_is_no_such_model(tmp_path: Path) -> None:
    written("qwen2_vl", tmp_path / "model")
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "embedding_dim": "wide"}))
    with pytest.raises(CheckpointError, match="embedding_dim"):
        PoolingInfo.of(ModelInfo.from_directory(str(tmp_path / "model")))
    config["vlm_config"]["model_type"] = "paligemma"
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="over a model of type 'paligemma'"):
        Ours.family_of(ModelInfo.from_directory(str(tmp_path / "model")))
