"""How a transcriber is asked follows from its own files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, InvalidRequestError
from app.records.speech_info import SpeechInfo
from app.records.transcription_rules import TimeRules, TranscriptionRules

CONFIG = {
    **{"model_type": "whisper", "vocab_size": 331, "num_mel_bins": 4, "max_source_positions": 1500},
    **{"max_target_positions": 20, "eos_token_id": 200, "decoder_layers": 2, "decoder_attention_heads": 2},
}
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": 201,
    "no_timestamps_token_id": 230,
    "lang_to_id": {"<|en|>": 202, "<|de|>": 203},
    "task_to_id": {"transcribe": 206, "translate": 205},
    "suppress_tokens": [4, 5],
    "begin_suppress_tokens": [6, 200],
    "max_initial_timestamp_index": 50,
    "alignment_heads": [[1, 0], [1, 1]],
}


def speech_of(tmp: Path, **changes: Any) -> SpeechInfo:
    found = SpeechInfo.of(ModelInfo(tmp, CONFIG, {**GENERATION, **changes}))
    assert found is not None
    return found


def test_prompts_and_rules(tmp_path: Path) -> None:
    speech = speech_of(tmp_path)
    assert speech.prompt("de", "transcribe", timestamps=True) == [201, 203, 206]
    assert speech.prompt("en", "translate", timestamps=False) == [201, 202, 205, 230]
    said = speech.prompt("de", "transcribe", timestamps=True, previous=range(40))
    assert said == [228, *range(31, 40), 201, 203, 206]
    assert (speech.no_speech, speech.first_timestamp) == (229, 231)
    assert (speech.timestamp_s, speech.window_s, speech.max_tokens) == (0.02, 30.0, 20)
    times = TimeRules(231, 200, 281, (230,))
    assert speech.rules(timestamps=True) == TranscriptionRules((4, 5), (6, 200), times)
    assert speech.rules(timestamps=False).times is None
    assert speech.alignment_heads == ((1, 0), (1, 1))


def test_a_model_of_one_language_is_told_none(tmp_path: Path) -> None:
    speech = replace(speech_of(tmp_path), languages={}, tasks={})
    assert speech.prompt(None, "transcribe", timestamps=False) == [201, 230]
    with pytest.raises(InvalidRequestError, match="English alone"):
        speech.prompt("de", "transcribe", timestamps=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lang_to_id", {"<|en|>": "x"}), ("suppress_tokens", [1.5]), ("alignment_heads", [[1, 2, 3]])],
)
def test_a_field_that_is_unusable_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=field):
        speech_of(tmp_path, **{field: value})


def test_languages_and_tasks_are_known_ones(tmp_path: Path) -> None:
    speech = speech_of(tmp_path)
    with pytest.raises(InvalidRequestError, match="language: 'fr' is none of de, en"):
        speech.prompt("fr", "transcribe", timestamps=True)
    with pytest.raises(InvalidRequestError, match="task: 'sing' is none of transcribe, translate"):
        speech.prompt("de", "sing", timestamps=True)


def test_a_model_without_ears_transcribes_nothing(tmp_path: Path) -> None:
    assert SpeechInfo.of(ModelInfo(tmp_path, {"model_type": "llama"}, {})) is None


def test_a_smaller_context_holds_prompt_and_transcript(tmp_path: Path) -> None:
    speech = speech_of(tmp_path)
    assert speech.within(30) is speech
    small = speech.within(10)
    assert small.max_tokens == 10
    for count in (3, 5, 40):
        said = small.prompt("de", "transcribe", timestamps=True, previous=range(count))
        assert said == [228, *range(max(0, count - 4), count), 201, 203, 206]
    assert small.within(2).prompt("de", "transcribe", timestamps=True, previous=range(40)) == [228, 201, 203, 206]


def test_who_knows_many_languages(tmp_path: Path) -> None:
    silent = speech_of(tmp_path, lang_to_id=None, task_to_id=None, no_timestamps_token_id=None)
    assert not silent.is_multilingual
    assert speech_of(tmp_path, is_multilingual=True).is_multilingual
    large = ModelInfo(tmp_path, {**CONFIG, "vocab_size": 51_865}, {"decoder_start_token_id": 201})
    found = SpeechInfo.of(large)
    assert found is not None
    assert found.is_multilingual
    told = silent.with_tokens({"en": 202}, {"transcribe": 206}, 230)
    assert (told.no_timestamps, told.first_timestamp, told.no_speech, told.previous) == (230, 231, 229, 228)
    assert told.prompt("en", "transcribe", timestamps=False) == [201, 202, 206, 230]
