"""Videos through `LLM`, as vLLM takes them: files, arrays, parts of messages; tokens behind one are transformers'."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app import LLM, SamplingParams
from app.api.generation.served_models import load_served_model
from app.config.engine import EngineConfig
from app.config.model import ModelConfig
from app.errors import InvalidRequestError, UnsupportedError
from app.offline.media import PromptEncoder
from app.records.media import MediaAsk
from tests.chatting_media import chatting_media_model
from tests.media.media_model import END, START, VIDEO, reader
from tests.media.videos.clips import decoded, file_of, frames
from tests.models.multimodal.test_families_that_see_videos import judged

FILE = file_of(frames(24))
PROMPT = f"See {START}{VIDEO}{END}"


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    own = reader(max_decoders=1)
    folder = tmp_path_factory.mktemp("videos")

    def load(name: str) -> PromptEncoder:
        path = folder / name
        path = path if path.exists() else chatting_media_model(name, path)
        return PromptEncoder(load_served_model(ModelConfig(name="m", engine=EngineConfig(model=str(path))), own))

    yield load
    own.close()


def shown(encoded: Any) -> Any:
    (ask,) = encoded.asks
    assert isinstance(ask, MediaAsk)
    (item,) = ask.items
    return item.kind, item.grid, item.digest


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_every_form_shows_the_same(encoders: Any, name: str) -> None:
    encoder = encoders(name)
    url = f"data:video/mp4;base64,{base64.b64encode(FILE).decode()}"
    files = [encoder.encoded({"prompt": PROMPT, "multi_modal_data": {"video": one}}) for one in (FILE, url, [FILE])]
    for part in ({"type": "video_url", "video_url": {"url": url}}, {"type": "video", "video": FILE}):
        files.append(encoder.rendered([{"role": "user", "content": [{"type": "text", "text": "See "}, part]}]))
    assert len({shown(one) for one in files}) == 1
    chosen = decoded(FILE)[[0, 5, 9, 14, 18, 23]]
    forms: list[Any] = [chosen, [Image.fromarray(one) for one in chosen], list(chosen), (chosen, {"fps": 24}), [chosen]]
    arrays = [encoder.encoded({"prompt": PROMPT, "multi_modal_data": {"video": one}}) for one in forms]
    assert len({shown(one) for one in arrays}) == 1
    assert shown(arrays[0])[1] == shown(files[0])[1]
    sampled = (decoded(FILE), {"fps": 8, "do_sample_frames": True})
    again = encoder.encoded({"prompt": PROMPT, "multi_modal_data": {"video": sampled}})
    assert again.token_ids == files[0].token_ids


def test_pictures_and_videos_find_their_places(encoders: Any) -> None:
    text = f"{START}{VIDEO}{END} and {START}<|image_pad|>{END}"
    media = {"image": np.zeros((16, 16, 3), np.uint8), "video": FILE}
    for name in "qwen2_vl", "glm4v":  # whose videos consist of tokens of pictures
        encoder = encoders(name)
        (ask,) = encoder.encoded({"prompt": text, "multi_modal_data": media}).asks
        assert [item.kind for item in ask.items] == ["video", "image"]
    with pytest.raises(InvalidRequestError, match="1 videos, but the prompt has 0 places for them"):
        encoder.encoded({"prompt": "none", "multi_modal_data": {"video": FILE}})


@pytest.mark.parametrize(
    "video",
    [3, np.zeros((2, 8, 8), np.uint8), np.zeros((2, 8, 8, 3)), [np.zeros((8, 8, 3), np.uint8), "x"], (FILE, 2, 3),
     [np.zeros((8, 8, 3), np.uint8), np.zeros((9, 8, 3), np.uint8)], (np.zeros((2, 8, 8, 3), np.uint8), {"fps": -1})],
)  # fmt: skip
def test_what_is_no_video_is_refused(encoders: Any, video: Any) -> None:
    with pytest.raises(InvalidRequestError):
        encoders("qwen2_vl").encoded({"prompt": PROMPT, "multi_modal_data": {"video": video}})


def test_other_models_refuse_it_by_name(encoders: Any) -> None:
    with pytest.raises(UnsupportedError, match="takes pictures; it takes no videos"):
        encoders("llava").encoded({"prompt": PROMPT, "multi_modal_data": {"video": FILE}})


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same video asked of again is encoded once."""
    path = chatting_media_model(name, tmp_path / "m")
    requests: list[Any] = []
    messages: Any = [{"role": "user", "content": [{"type": "video", "video": FILE}, {"type": "text", "text": "What?"}]}]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(path), device="cpu", num_threads=1, max_model_len=256, max_num_seqs=4, num_blocks=64) as llm:
        prepare = llm._core.prepare
        monkeypatch.setattr(llm._core, "prepare", lambda request: (requests.append(request), prepare(request))[1])
        outputs = [llm.chat(messages, greedy, use_tqdm=False)[0] for _ in range(2)]
    ask = requests[0].asked(MediaAsk)
    assert ask is not None
    _, expected = judged(name, list(requests[0].prompt_token_ids), ask, 4)
    assert [list(one.outputs[0].token_ids) for one in outputs] == [expected, expected]
    assert outputs[1].num_cached_tokens > ask.items[0].offset
