"""Transcripts by the model's own rules are those of transformers' `generate`: with times and without, after a text that
was said before, and in the language that is heard."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, WhisperForConditionalGeneration

from app.checkpoints.model_info import ModelInfo
from app.config.media import MediaConfig
from app.engine.core import EngineCore
from app.media.audio.mel import MelSettings
from app.media.audio.reader import SoundReader
from app.records.encoder_input import EncoderInput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.speech_info import SpeechInfo
from app.text.model_speech import ModelSpeech
from tests.engine.core_driver import run
from tests.engine.test_pictures import core_of
from tests.tiny_sounds import noise, tiny_whisper

END, START, NO_TIMES, SEEDS = 200, 201, 230, range(6)
RULES: dict[str, Any] = {
    **{"eos_token_id": END, "pad_token_id": END, "bos_token_id": END, "decoder_start_token_id": START},
    **{"is_multilingual": True, "no_timestamps_token_id": NO_TIMES, "prev_sot_token_id": 228},
    **{
        "lang_to_id": {"<|en|>": 202, "<|de|>": 203, "<|fr|>": 204},
        "task_to_id": {"translate": 205, "transcribe": 206},
    },
    **{"suppress_tokens": [4, 5, 90, 205, 206, 228], "begin_suppress_tokens": [6, END]},
    **{"max_initial_timestamp_index": 10, "forced_decoder_ids": None, "return_timestamps": False},
}


@functools.cache
def directory() -> str:
    """A random Whisper that has rules."""
    found = tiny_whisper(seed=3)
    model = WhisperForConditionalGeneration.from_pretrained(found)
    for name, value in RULES.items():
        setattr(model.generation_config, name, value)
        if hasattr(model.config, name):
            setattr(model.config, name, value)
    model.config.suppress_tokens = model.config.begin_suppress_tokens = None
    model.generation_config._from_model_config = False  # else what is not of config.json is forgotten
    model.save_pretrained(found)
    return str(found)


@functools.cache
def judge() -> PreTrainedModel:
    model: PreTrainedModel = WhisperForConditionalGeneration.from_pretrained(
        directory(), dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@functools.cache
def speech() -> SpeechInfo:
    found = SpeechInfo.of(ModelInfo.from_directory(directory()))
    assert found is not None
    return found


def features(given: EncoderInput) -> torch.Tensor:
    return torch.from_numpy(np.array(given.array())).unsqueeze(0)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return core_of(directory(), max_model_len=64, max_num_seqs=4)


@pytest.mark.parametrize("said", [[], [7, 8, 9, 10, 11]], ids=["alone", "after a text"])
@pytest.mark.parametrize("timestamps", [True, False])
def test_transcripts_are_those_of_transformers(core: EngineCore, timestamps: bool, said: list[int]) -> None:
    prompt = speech().prompt("de", "transcribe", timestamps=timestamps, previous=said)
    params = SamplingParams(temperature=0, max_tokens=24, seed=0)
    asks = speech().rules(timestamps=timestamps)
    requests = [EngineRequest(f"r{seed}", prompt, params, asks=(noise(seed), asks)) for seed in SEEDS]
    tokens = run(core, requests).tokens
    options: dict[str, Any] = {} if not said else {"prompt_ids": torch.tensor([228, *said])}
    times = 0
    for seed in SEEDS:
        with torch.inference_mode():
            out = judge().generate(
                features(noise(seed)), language="de", task="transcribe", return_timestamps=timestamps,
                max_new_tokens=24, do_sample=False, num_beams=1, return_dict_in_generate=True,
                force_unique_generate_call=True, **options,
            )["sequences"][0].tolist()  # fmt: skip
        begin = len(prompt) if out[: len(prompt)] == prompt else 0
        expected = [token for token in out[begin:] if token != END]
        assert [token for token in tokens[f"r{seed}"] if token != END] == expected, seed
        times += sum(token > NO_TIMES for token in expected)
    assert bool(times) or not timestamps


def test_the_language_is_that_which_transformers_hears(core: EngineCore) -> None:
    """One request of one token, of which the logprobs of languages are told, and that of silence."""
    silence = speech().no_speech
    assert silence is not None
    asked = (*speech().languages.values(), silence)
    params = SamplingParams(temperature=0, max_tokens=1, seed=0, logprobs=1, logprob_token_ids=asked)
    results = run(core, [EngineRequest(f"r{seed}", [START], params, asks=(noise(seed),)) for seed in SEEDS])
    for seed in SEEDS:
        entry = results.logprobs[f"r{seed}"][0]
        found = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        with torch.inference_mode():
            expected = int(judge().detect_language(features(noise(seed)))[0])
            logits = judge()(features(noise(seed)), decoder_input_ids=torch.tensor([[START]])).logits[0, -1]
        assert max(speech().languages.values(), key=found.__getitem__) == expected
        judged = logits.log_softmax(-1)
        assert [found[token] for token in asked] == pytest.approx([float(judged[token]) for token in asked], abs=1e-3)


def test_a_transcript_s_own_request_tells_whether_nobody_speaks(core: EngineCore) -> None:
    """Where silence is the most likely token behind the first mark; else something else is likelier."""
    prompt = speech().prompt("en", "transcribe", timestamps=False)
    params = SamplingParams(temperature=0, max_tokens=3, seed=0, prompt_logprobs=1)
    results = run(core, [EngineRequest(f"r{seed}", prompt, params, asks=(noise(seed),)) for seed in SEEDS])
    for seed in SEEDS:
        entries = results.prompt_logprobs[f"r{seed}"]
        with torch.inference_mode():
            logits = judge()(features(noise(seed)), decoder_input_ids=torch.tensor([[START]])).logits[0, -1]
        likely = int(logits.argmax())
        for silence, expected in ((likely, float(logits.softmax(-1)[likely])), (likely - 1, 0.0)):
            own = ModelSpeech(replace(speech(), no_speech=silence), MelSettings(), SoundReader(MediaConfig(), b"key"))
            assert own.silence(prompt, entries) == pytest.approx(expected, abs=1e-4)
            assert own.silence(prompt, None) is None
            assert own.silence([START], entries[:1]) is None


def test_asking_again_encodes_nothing(core: EngineCore) -> None:
    """As a transcript does behind its language, and at another temperature."""
    given, counted = noise(40), dict[str, float]()
    worker = core.executor._worker  # type: ignore[attr-defined]
    execute = worker.execute

    def count(step: Any) -> Any:
        outputs = execute(step)
        for output in outputs:
            for name, value in output.figures.items():
                counted[name] = counted.get(name, 0) + value
        return outputs

    worker.execute = count
    prompt, rules = speech().prompt("en", "transcribe", timestamps=True), speech().rules(timestamps=True)
    params = SamplingParams(temperature=0, max_tokens=4, seed=0)
    run(core, [EngineRequest("language", [START], replace_tokens(params, 1), asks=(given,))])
    for temperature in (0.0, 0.4):
        own = params.model_copy(update={"temperature": temperature})
        run(core, [EngineRequest(f"t{temperature}", prompt, own, asks=(given, rules))])
    worker.execute = execute
    assert counted == {"mm_cache_queries": 3, "mm_cache_hits": 2}


def replace_tokens(params: SamplingParams, count: int) -> SamplingParams:
    return params.model_copy(update={"max_tokens": count})


def test_another_digest_is_another_sound(core: EngineCore) -> None:
    given = noise(41)
    params = SamplingParams(temperature=0, max_tokens=3, seed=0)
    prompt = speech().prompt("en", "transcribe", timestamps=False)
    other = replace(noise(42), digest=given.digest[::-1])
    found = run(core, [EngineRequest(f"r{i}", prompt, params, asks=(own,)) for i, own in enumerate((given, other))])
    assert found.tokens["r0"] != found.tokens["r1"]
