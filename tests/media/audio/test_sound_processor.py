"""What becomes of a sound in a prompt, judged by transformers' extractor and its processors' rules: tokens, frames and
features; settings that contradict config.json are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from app.errors import CheckpointError, InvalidRequestError
from app.media.audio.audio_flamingo import AudioFlamingoProcessor
from app.media.audio.qwen2_audio import Qwen2AudioProcessor
from app.media.audio.sound_processor import SoundProcessor
from app.media.audio.sound_processors import SOUND_PROCESSORS
from app.media.audio.voxtral import VoxtralProcessor
from app.media.reader import MediaReader
from tests.media.audio.sounds import RATE, file_of, noise, whole_numbers
from tests.media.media_model import reader as make_reader

EARS = {"num_mel_bins": 12, "max_source_positions": 50, "hidden_size": 32, "intermediate_size": 64}
EXTRACTOR = {"feature_size": 12, "chunk_length": 1}
MAX_S = 1e9


def processor(kind: type[SoundProcessor], own: dict[str, Any] = EXTRACTOR, **ears: Any) -> SoundProcessor:
    return kind(kind.settings_of(own, {"audio_config": {**EARS, **ears}}) | {"placeholder": "<A>"})


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    found = make_reader(max_decoders=1)
    yield found
    found.close()


def heard(wave: np.ndarray) -> np.ndarray:
    """Samples as a file of 16 bits holds them."""
    return whole_numbers(wave[:, 0]).astype(np.float32) / 32_768


@pytest.mark.parametrize("seconds", [0.03, 0.5, 0.777, 1.0])
def test_qwen2_audio_hears_what_transformers_does(reader: MediaReader, seconds: float) -> None:
    wave, own = noise(seconds, seed=2), processor(Qwen2AudioProcessor)
    picture = reader.read_sound(file_of(whole_numbers(wave)), "qwen2_audio", own, MAX_S)
    judge = WhisperFeatureExtractor(**EXTRACTOR)
    options: dict[str, Any] = {"sampling_rate": RATE, "return_attention_mask": True, "padding": "max_length"}
    expected = judge(heard(wave), return_tensors="np", **options)
    frames = int(expected["attention_mask"].sum())
    assert picture.kind == "audio"
    assert picture.layout.grid == (1, 1, frames)
    assert picture.layout.runs == (("<A>", (((frames - 1) // 2 + 1) - 2) // 2 + 1),)  # as its processor counts
    found = np.frombuffer(picture.pixels, "<f4").reshape(picture.shape)
    np.testing.assert_allclose(found, expected["input_features"][0], atol=2e-4)


@pytest.mark.parametrize("seconds", [0.03, 0.777, 1.0, 2.3, 3.0])
def test_audio_flamingo_hears_what_transformers_does(reader: MediaReader, seconds: float) -> None:
    """Each window is heard alone; tokens as its processor counts them, by the frames of all windows."""
    wave, own = noise(seconds, seed=4), processor(AudioFlamingoProcessor)
    picture = reader.read_sound(file_of(whole_numbers(wave)), "audio_flamingo", own, MAX_S)
    judge, samples = WhisperFeatureExtractor(**EXTRACTOR), heard(wave)
    windows = [samples[begin : begin + RATE] for begin in range(0, len(samples), RATE)]
    options: dict[str, Any] = {"sampling_rate": RATE, "return_attention_mask": True, "padding": "max_length"}
    expected = judge(windows, return_tensors="np", **options)
    frames = int(expected["attention_mask"].sum())
    assert picture.layout.grid == (len(windows), 1, frames)
    assert picture.layout.runs == (("<A>", (((frames - 1) // 2 + 1) - 2) // 2 + 1),)
    found = np.frombuffer(picture.pixels, "<f4").reshape(picture.shape)
    np.testing.assert_allclose(found, expected["input_features"], atol=2e-4)
    count = picture.layout.runs[0][1]
    assert own.max_s(count) >= seconds
    assert own.max_s(count - 1) < seconds


def test_audio_flamingo_hears_so_long_and_no_longer() -> None:
    own = processor(AudioFlamingoProcessor, {**EXTRACTOR, "max_audio_len": 3})
    assert own.max_s(10_000) == 3
    own.layout(3 * RATE)
    with pytest.raises(InvalidRequestError, match=r"lasts 3\.00 s; the model hears 3 s"):
        own.layout(3 * RATE + 1)
    with pytest.raises(InvalidRequestError, match="too short"):
        own.layout(20)
    with pytest.raises(CheckpointError, match="max_audio_len"):
        processor(AudioFlamingoProcessor, {**EXTRACTOR, "max_audio_len": "long"})
    with pytest.raises(CheckpointError, match="max_audio_len"):
        processor(AudioFlamingoProcessor, {**EXTRACTOR, "max_audio_len": 3_601})
    with pytest.raises(CheckpointError, match="max_audio_len=600 are 460800000 bytes of features"):
        processor(AudioFlamingoProcessor, {"feature_size": 12, "hop_length": 1})
    with pytest.raises(CheckpointError, match="max_source_positions=1"):
        processor(AudioFlamingoProcessor, {"feature_size": 12}, max_source_positions=1)


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.3])
def test_voxtral_hears_what_transformers_does(reader: MediaReader, seconds: float) -> None:
    """The sound is one until it has features: frames at a window's border see both sides, loudness is that of all."""
    wave, own = noise(seconds, seed=2), processor(VoxtralProcessor)
    picture = reader.read_sound(file_of(whole_numbers(wave)), "voxtral", own, MAX_S)
    judge = WhisperFeatureExtractor(**EXTRACTOR)
    options: dict[str, Any] = {"padding": True, "truncation": False, "pad_to_multiple_of": RATE}
    whole = judge(heard(wave), sampling_rate=RATE, return_tensors="np", **options)["input_features"]
    expected = whole.reshape(12, -1, 100).transpose(1, 0, 2)
    windows = int(np.ceil(seconds))
    assert picture.layout.grid == (windows, 1, 100)
    assert picture.layout.num_tokens == windows * 25
    found = np.frombuffer(picture.pixels, "<f4").reshape(picture.shape)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_sound_that_comes_again_is_not_decoded(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    wave, own = whole_numbers(noise(0.6, seed=9)), processor(Qwen2AudioProcessor)
    data, same = file_of(wave), file_of(wave, "FLAC")
    first = reader.read_sound(data, "qwen2_audio", own, MAX_S)
    assert reader.read_sound(same, "qwen2_audio", own, MAX_S).digest == first.digest  # another file of the same samples
    others = [
        reader.read_sound(data, "qwen2_audio", own, MAX_S, "tenant"),
        reader.read_sound(data, "voxtral", processor(VoxtralProcessor), MAX_S),
        reader.read_sound(file_of(noise(0.6, seed=8)), "qwen2_audio", own, MAX_S),
    ]
    assert len({first.digest, *(one.digest for one in others)}) == 4
    monkeypatch.setattr(reader.sounds, "decode", None)
    assert reader.read_sound(data, "qwen2_audio", own, MAX_S) is first


def test_what_the_model_does_not_take(reader: MediaReader) -> None:
    own = processor(Qwen2AudioProcessor)
    with pytest.raises(InvalidRequestError, match=r"lasts 1.02 s; the model hears 1 s"):
        own.layout(16_300)
    with pytest.raises(InvalidRequestError, match="too short for the model"):
        reader.read_sound(file_of(noise(0.005)), "qwen2_audio", own, MAX_S)
    with pytest.raises(InvalidRequestError, match=r"lasts 2 s; at most 0.5 s"):
        reader.read_sound(file_of(noise(2.0)), "qwen2_audio", own, 0.5)


@pytest.mark.parametrize(("name", "most"), [("qwen2_audio", 13), ("qwen2_audio", 20), ("voxtral", 25), ("voxtral", 60)])
def test_the_longest_that_so_many_tokens_are(name: str, most: int) -> None:
    own = processor(SOUND_PROCESSORS.load(name))
    samples = round(own.max_s(most) * RATE)
    assert own.layout(samples).num_tokens <= most
    assert own.layout(samples + 4 * own.mel.hop).num_tokens > most


def test_settings_that_contradict_each_other() -> None:
    for own, says in (
        ({"feature_size": 80}, "feature_size is 80, which contradicts num_mel_bins, 12"),
        ({"chunk_length": 30}, "chunk_length"),
        ({"hop_length": "160"}, "hop_length is '160'"),
    ):
        with pytest.raises(CheckpointError, match=says):
            processor(Qwen2AudioProcessor, own)
    with pytest.raises(CheckpointError, match="lacks hidden_size"):
        processor(VoxtralProcessor, hidden_size=None)
    for size in (60, 50 * 32 * 2):
        with pytest.raises(CheckpointError, match=rf"no whole number of tokens of intermediate_size={size}"):
            processor(VoxtralProcessor, intermediate_size=size)
