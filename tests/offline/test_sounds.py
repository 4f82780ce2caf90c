"""Sounds in `LLM`, from samples to tokens, judged by transformers: its extractor's features, its model's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4AudioFeatureExtractor, Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

from app import LLM, SamplingParams
from app.errors import InvalidRequestError, UnsupportedError
from app.records.media import MediaItem
from tests.media.audio.sounds import RATE, file_of, noise, whole_numbers
from tests.media.pictures import picture
from tests.media.sound_model import place_of, write_talk
from tests.tiny_hearing import MELS, POSITIONS, hearing_model, judge_of, told

TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
WINDOW = 2 * POSITIONS * 160  # samples
FAMILIES = ["qwen2_audio", "audio_flamingo", "voxtral", "qwen2_5_omni", "qwen3_asr", "gemma4"]


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny model that listens, with a tokenizer, a chat template and the settings of its extractor."""
    path = tmp_path_factory.mktemp(request.param) / request.param
    path.mkdir()
    for file in hearing_model(request.param).iterdir():
        (path / file.name).symlink_to(file)
    write_talk(path, request.param, {"feature_size": MELS, **EXTRACTORS.get(request.param, {})})
    with LLM(str(path), device="cpu", num_threads=1, max_model_len=256, max_num_seqs=4, num_blocks=64) as llm:
        yield llm


def name_of(llm: LLM) -> str:
    return Path(llm._model.info.directory).name


EXTRACTORS = {"qwen2_5_omni": {"chunk_length": 2}, "gemma4": {"max_soft_tokens": 16}}


def heard(name: str, samples: np.ndarray) -> MediaItem:
    """A sound as transformers' extractors prepare it, alone."""
    options: dict[str, Any] = {"return_attention_mask": True, "return_tensors": "np"}
    if name == "voxtral":
        options |= {"padding": True, "truncation": False, "pad_to_multiple_of": WINDOW}
        whole = WhisperFeatureExtractor(feature_size=MELS)(samples, sampling_rate=RATE, **options).input_features[0]
        values = whole.reshape(MELS, -1, 2 * POSITIONS).transpose(1, 0, 2)
        return item(values, (len(values), 1, 2 * POSITIONS))
    if name == "audio_flamingo":
        windows = [samples[begin : begin + WINDOW] for begin in range(0, len(samples), WINDOW)]
        options |= {"padding": "max_length", "max_length": WINDOW}
        given = WhisperFeatureExtractor(feature_size=MELS)(windows, sampling_rate=RATE, **options)
        return item(given["input_features"], (len(windows), 1, int(given["attention_mask"].sum())))
    if name == "gemma4":
        found = Gemma4AudioFeatureExtractor(feature_size=MELS)([samples])
        count = int(found["input_features_mask"][0].sum())
        return item(found["input_features"][0][:count].T, (1, 1, count))
    if name == "qwen3_asr":
        given = Qwen3ASRFeatureExtractor(feature_size=MELS)(samples, sampling_rate=RATE, padding=True, **options)
    else:
        options |= {"padding": "max_length", **({"max_length": WINDOW} if name == "qwen2_audio" else {})}
        judge = WhisperFeatureExtractor(feature_size=MELS, **EXTRACTORS.get(name, {}))
        given = judge(samples, sampling_rate=RATE, **options)
    count = int(given["attention_mask"].sum())
    kept = given["input_features"][0] if name == "qwen2_audio" else given["input_features"][0][:, :count]
    return item(kept, (1, 1, count))


def item(values: np.ndarray, grid: tuple[int, int, int]) -> MediaItem:
    return MediaItem("audio", b"", 0, 1, grid, values.shape, np.ascontiguousarray(values, "<f4").tobytes())


def judged(name: str, ids: list[int], waves: list[np.ndarray]) -> list[int]:
    """transformers' greedy continuation, each token from the whole text, of what its extractor makes of the sounds."""
    items = [heard(name, whole_numbers(wave[:, 0]).astype(np.float32) / 32_768) for wave in waves]
    seen = told(name, items)
    answer: list[int] = []
    for _ in range(TOKENS):
        given = torch.tensor([ids + answer])
        with torch.inference_mode():
            logits = judge_of(name)(input_ids=given, attention_mask=torch.ones_like(given), use_cache=False, **seen)
        answer.append(int(logits.logits[0, -1].argmax()))
    return answer


def test_a_sound_becomes_transformers_tokens(llm: LLM) -> None:
    name, waves = name_of(llm), [noise(0.5, seed=1), noise(0.62, seed=2)]
    if name in ("voxtral", "audio_flamingo"):
        waves[1] = noise(1.5, seed=2)  # three windows
    parts = [{"type": "audio", "audio": (wave[:, 0], RATE)} for wave in waves]
    text = {"type": "text", "text": "and"}
    messages = [{"role": "user", "content": [text, parts[0], text, parts[1]]}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == judged(name, output.prompt_token_ids, waves)
    place = place_of(name)
    prompt = f"<|im_start|>user\nand{place}and{place}<|im_end|>\n<|im_start|>assistant\n"
    for form in ([file_of(wave, kind) for wave in map(whole_numbers, waves)] for kind in ("WAV", "FLAC")):
        (same,) = llm.generate({"prompt": prompt, "multi_modal_data": {"audio": form}}, GREEDY, use_tqdm=False)
        assert same.prompt_token_ids == output.prompt_token_ids
        assert same.outputs[0].token_ids == output.outputs[0].token_ids
        assert same.num_cached_tokens > len(same.prompt_token_ids) // 2
    other = [waves[1][: len(waves[0])], waves[1]]
    (third,) = llm.generate(
        {"prompt": prompt, "multi_modal_data": {"audio": [(wave[:, 0], RATE) for wave in other]}},
        GREEDY,
        use_tqdm=False,
    )
    assert third.prompt_token_ids == output.prompt_token_ids
    assert third.num_cached_tokens < 16  # what lies behind another sound is no prefix
    assert third.outputs[0].token_ids == judged(name, third.prompt_token_ids, other)


def test_wrong_forms(llm: LLM) -> None:
    place, wave = place_of(name_of(llm)), noise(0.5)[:, 0]
    wrong: list[tuple[Any, str]] = [
        ({"prompt": "a", "multi_modal_data": {"audio": (wave, RATE)}}, "1 sounds, but the prompt has 0 places"),
        ({"prompt": place, "multi_modal_data": {"film": wave}}, "multi_modal_data is an object with"),
        ({"prompt": place, "multi_modal_data": {"audio": wave}}, "a sound is a pair of samples"),
        ({"prompt": place, "multi_modal_data": {"audio": (wave * np.nan, RATE)}}, "samples that are no numbers"),
        ({"prompt": place, "multi_modal_data": {"audio": "http://127.0.0.1/a.wav"}}, "is no data URL"),
        ({"prompt": place, "multi_modal_data": {"audio": b"RIFF"}}, "multi_modal_data is no sound"),
    ]
    for prompt, says in wrong:
        with pytest.raises(InvalidRequestError, match=says):
            llm.generate(prompt, use_tqdm=False)
    if name_of(llm) in ("qwen2_audio", "audio_flamingo", "voxtral", "qwen3_asr"):
        with pytest.raises(UnsupportedError, match="takes sounds; it takes no pictures"):
            llm.generate({"prompt": place, "multi_modal_data": {"image": picture()}}, use_tqdm=False)


def test_pictures_and_sounds_in_one_prompt(llm: LLM) -> None:
    """Each kind in its own places, in the order of its own."""
    if name_of(llm) not in ("qwen2_5_omni", "gemma4"):
        return  # those hear alone
    place, sounds = place_of(name_of(llm)), [(noise(seconds, seed=4)[:, 0], RATE) for seconds in (0.5, 0.8)]
    shown = {"image": picture(40, 60), "audio": sounds}
    (one,) = llm.generate(
        {"prompt": f"{place} and <|300|> or {place}", "multi_modal_data": shown}, GREEDY, use_tqdm=False
    )
    ids = one.prompt_token_ids
    assert ids.count(300) > 1
    first, last = (token for token in (ids.index(306), len(ids) - 1 - ids[::-1].index(306)))
    assert first < ids.index(300) < last
    (again,) = llm.generate(
        {"prompt": f"{place} and <|300|> or {place}", "multi_modal_data": shown}, GREEDY, use_tqdm=False
    )
    assert again.outputs[0].token_ids == one.outputs[0].token_ids
    assert again.num_cached_tokens > 0
    shown["audio"] = sounds[::-1]
    (other,) = llm.generate(
        {"prompt": f"{place} and <|300|> or {place}", "multi_modal_data": shown}, GREEDY, use_tqdm=False
    )
    assert other.prompt_token_ids != ids
