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
