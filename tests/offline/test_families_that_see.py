"""Every family that sees, through `LLM.chat` with Pillow's pictures: tokens are transformers' of the pixels that its
processor made, the second turn's, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app import LLM, SamplingParams
from app.records.media import MediaAsk
from tests.chatting_media import chatting_media_model
from tests.media.pictures import picture
from tests.offline.test_pictures import sent
from tests.tiny_media import MODELS, judged, remember_size

TOKENS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def said(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": one} if isinstance(one, str) else {"image_pil": one} for one in parts]
    return {"role": "user", "content": content}


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_is_answered_as_transformers_would(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [picture(30, 20), picture(50, 17, seed=1), picture(17, 33, seed=2)]
    chat = [said("a", images[0], "b", images[1]), {"role": "assistant", "content": "c"}, said(images[2], "d")]
    path = chatting_media_model(name, tmp_path / "m")
    with LLM(str(path), device="cpu", num_threads=1, max_model_len=384, max_num_seqs=4, num_blocks=64) as llm:
        requests = sent(llm, monkeypatch)
        (first,) = llm.chat(chat[:1], GREEDY, use_tqdm=False)
        (second,) = llm.chat(chat, GREEDY, use_tqdm=False)
    for output, request, shown in zip((first, second), requests, (images[:2], images), strict=True):
        ask = request.asked(MediaAsk)
        assert len(ask.items) == len(shown)
        for item, image in zip(ask.items, shown, strict=True):
            remember_size(item.grid, item.shape[0], image.height, image.width)
        assert output.outputs[0].token_ids == judged(name, output.prompt_token_ids, ask, TOKENS)[1]
    assert second.num_cached_tokens > 0


def test_parts_of_a_long_picture_are_answered_as_transformers_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 that pans and scans: each part sees itself alone, and words stand between them, in small chunks, too."""
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
    path = chatting_media_model("gemma3", tmp_path / "m")
    chat = [said("a", picture(50, 17), "b", picture(20, 20, seed=1))]
    sizes = {"max_model_len": 384, "max_num_seqs": 4, "num_blocks": 64, "max_num_batched_tokens": 12}
    with LLM(str(path), device="cpu", num_threads=1, mm_processor_kwargs=options, **sizes) as llm:
        requests = sent(llm, monkeypatch)
        (output,) = llm.chat(chat, GREEDY, use_tqdm=False)
        text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    (first, *others) = (ask := requests[0].asked(MediaAsk)).items
    assert [item.shape[0] for item in (first, *others)] == [1] * 5
    assert len({item.digest for item in ask.items}) == 5
    assert "aHere is the original image \n\n" in text
    assert text.count(" and here are some crops to help you see better ") == 1
    assert output.outputs[0].token_ids == judged("gemma3", output.prompt_token_ids, ask, TOKENS)[1]
