"""Pictures in `LLM`, from Pillow's to tokens, judged by transformers: its processor's pixels, its model's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import LLM, SamplingParams
from app.errors import InvalidRequestError, UnsupportedError
from app.records.media import MediaAsk
from tests.chatting_media import GRID, chatting_media_model
from tests.media.media_model import END, PAD, START
from tests.media.pictures import file_of, picture
from tests.tiny_media import MEAN, STD, judged

NAME, TOKENS = "qwen3_vl", 6
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny Qwen3-VL with a tokenizer, a chat template and the settings of a processor."""
    path = chatting_media_model(NAME, tmp_path_factory.mktemp("sees") / "m")
    with LLM(str(path), device="cpu", num_threads=1, max_model_len=256, max_num_seqs=4, num_blocks=64) as llm:
        yield llm


def sent(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that the engine is given from now on."""
    found: list[Any] = []
    prepare = llm._core.prepare
    monkeypatch.setattr(llm._core, "prepare", lambda request: (found.append(request), prepare(request))[1])
    return found


def test_a_picture_becomes_transformers_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_of = pytest.importorskip(
        "transformers"
    ).models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil
    requests = sent(llm, monkeypatch)
    images = [picture(30, 20), picture(50, 17, seed=1)]
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    first = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, parts[0], {"type": "text", "text": "b"}, parts[1]],
    }
    (output,) = llm.chat([first], GREEDY, use_tqdm=False)
    (request,) = requests
    ask = request.asked(MediaAsk)
    judge = judge_of(**GRID, image_mean=MEAN, image_std=STD)
    expected = judge(images, return_tensors="np")
    assert [item.grid for item in ask.items] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
    ours = np.concatenate([np.frombuffer(item.pixels, np.uint8).reshape(item.shape) for item in ask.items]) / 255
    mean, std = (np.asarray(one).reshape(3, 1, 1) for one in (judge.image_mean, judge.image_std))
    twice = np.repeat(((ours - mean) / std)[:, :, None], 2, axis=2).reshape(len(ours), -1)
    np.testing.assert_allclose(twice, expected["pixel_values"], atol=1e-5)
    assert output.outputs[0].token_ids == judged(NAME, output.prompt_token_ids, ask, TOKENS)[1]
    assert len(output.prompt_token_ids) == len(request.prompt_token_ids)
    text = f"a{START}{PAD}{END}b{START}{PAD}{END}"
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    (same,) = llm.generate({"prompt": prompt, "multi_modal_data": {"image": images}}, GREEDY, use_tqdm=False)
    assert (same.prompt_token_ids, same.outputs[0].token_ids) == (output.prompt_token_ids, output.outputs[0].token_ids)
    assert same.num_cached_tokens > 0


def test_forms_of_a_picture(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = sent(llm, monkeypatch)
    image = picture(24, 24)
    forms = [image, np.asarray(image), file_of(image), image.convert("RGBA")]
    prompts = [{"prompt": f"{START}{PAD}{END}", "multi_modal_data": {"image": form}} for form in forms]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert len({request.asked(MediaAsk).items[0].digest for request in requests}) == 1
    wrong: list[tuple[Any, str]] = [
        ({"prompt": "a", "multi_modal_data": {"image": image}}, "1 pictures, but the prompt has 0 places"),
        ({"prompt": PAD, "multi_modal_data": {"film": image}}, "multi_modal_data is an object with"),
        ({"prompt": PAD, "multi_modal_data": {"image": Path("a.png")}}, "a picture is one of Pillow's"),
        ({"prompt": PAD, "multi_modal_data": {"image": "http://127.0.0.1/a.png"}}, "is no data URL"),
        ({"prompt": PAD, "multi_modal_data": {"image": b"GIF89a"}}, "multi_modal_data is malformed"),
    ]
    for prompt, says in wrong:
        with pytest.raises(InvalidRequestError, match=says):
            llm.generate(prompt, use_tqdm=False)


def test_a_model_of_text_takes_none() -> None:
    with LLM("tiny-chat", device="cpu", num_threads=1, num_blocks=16) as llm:
        with pytest.raises(UnsupportedError, match="reads text only"):
            llm.generate({"prompt": "x", "multi_modal_data": {"image": picture()}}, use_tqdm=False)
        with pytest.raises(UnsupportedError, match="reads text only"):
            llm.chat([{"role": "user", "content": [{"type": "image_pil", "image_pil": picture()}]}], use_tqdm=False)
