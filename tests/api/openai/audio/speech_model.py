"""A model directory that transcribes, with everything but weights, and a scripted engine behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from app.config.media import MediaConfig
from app.media.audio.reader import SoundReader
from app.records.alignment_ask import AlignmentAsk
from app.records.encoder_input import EncoderInput
from app.records.outputs import EngineOutput, PooledResult
from app.records.request import EngineRequest
from app.records.step import TokenLogprobs
from app.text.model_speech import ModelSpeech
from app.text.served_model import ServedModel
from tests import limits
from tests.api.conftest import ScriptedClient, served, write_model

LANGUAGES = ("en", "de", "ja")
SPECIAL = (
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
WINDOW_S = 1.0
TIMES = tuple(f"<|{i / 50:.2f}|>" for i in range(int(WINDOW_S * 50) + 1))
NUM_MELS, NUM_POSITIONS, MAX_TOKENS = 20, 50, 64


def write_speech_model(path: Path, languages: tuple[str, ...] = LANGUAGES) -> Path:
    """Write the directory: Whisper's, which hears a second at a time."""
    write_model(path, MAX_TOKENS)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens([*SPECIAL])
    backend.add_tokens([*TIMES])  # as in published ones: none of them is special
    backend.save(str(path / "tokenizer.json"))
    ids = {name: backend.token_to_id(name) for name in SPECIAL}
    end = backend.token_to_id("<|im_end|>")
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": backend.get_vocab_size(),
        **{"num_mel_bins": NUM_MELS, "max_source_positions": NUM_POSITIONS, "max_target_positions": MAX_TOKENS},
        **{"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 96},
        **{"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
        **{"eos_token_id": end, "pad_token_id": 0, "bos_token_id": 0},
        **{"decoder_start_token_id": ids["<|startoftranscript|>"]},
    }
    generation = {
        "eos_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in languages},
        "alignment_heads": [[0, 1], [0, 3]],
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")} if languages else {},
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "chat_template.jinja").unlink()
    return path


def write_weights(path: Path) -> None:
    """Random weights for the model in `path`."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(1)
    config = WhisperConfig(**json.loads((path / "config.json").read_text()), init_std=0.2)
    WhisperForConditionalGeneration(config).save_pretrained(path / "saved")
    (path / "saved/model.safetensors").rename(path / "model.safetensors")


def served_speech(path: Path, **options: Any) -> ServedModel:
    """The model in `path` as the ingress would serve it."""
    return with_speech(served(path, "whisper", **options))


def with_speech(model: ServedModel) -> ServedModel:
    """The same model, which hears."""
    config = MediaConfig(decode_timeout_s=limits.patience_s(), max_decoders=1, max_sound_s=60.0)
    model.speech = ModelSpeech.of(model.info, SoundReader(config, b"key"), model.tokenizer)
    assert model.speech is not None
    return model


def diagonal(request: EngineRequest, ask: AlignmentAsk) -> NDArray[np.float32]:
    """Each token is heard two positions, 0.04 s, behind the one before."""
    weights = np.zeros((len(request.prompt_token_ids) - ask.first, ask.num_positions), np.float32)
    for token in range(len(weights)):
        weights[token, 2 * token + 1 : 2 * token + 3] = 1.0
    return weights


class Transcriber(ScriptedClient):
    """Says by a script what it hears: a text, or tokens, for a piece's request; logprobs and languages as told."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self.model = model
        self.says: Callable[[EngineRequest], str | list[int]] = lambda request: " Hello"
        self.logprob: Callable[[EngineRequest], float] = lambda request: -0.1
        self.hears = "en"
        self.aligns: Callable[[EngineRequest, AlignmentAsk], NDArray[np.float32]] = diagonal
        self.no_speech = 0.01
        self.tells_silence = True  # with the logprobs of a prompt, where they are asked for

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, times and other marks among them."""
        return self.model.tokenizer.encode(text, add_special_tokens=False)

    def id_of(self, mark: str) -> int:
        """The token of a mark."""
        (token,) = self.ids(f"<|{mark}|>")
        return token

    @property
    def transcripts(self) -> list[EngineRequest]:
        """Requests for texts, in the order in which they came."""
        others = [request for request in self.requests if request.sampling.logprob_token_ids is None]
        return [request for request in others if request.asked(AlignmentAsk) is None]

    @property
    def detections(self) -> list[EngineRequest]:
        """Requests for what the model hears before the first word."""
        return [request for request in self.requests if request.sampling.logprob_token_ids is not None]

    def _outputs(self, model: ServedModel, request: EngineRequest) -> Iterator[EngineOutput]:
        assert request.asked(EncoderInput) is not None
        named = request.sampling.logprob_token_ids
        if named is not None:
            yield self._detected(request, list(named))
            return
        if (ask := request.asked(AlignmentAsk)) is not None:
            pooled = PooledResult.of(self.aligns(request, ask))
            yield EngineOutput(request.request_id, [5], "length", pooled=pooled)
            return
        said = self.says(request)
        tokens = [*(self.ids(said) if isinstance(said, str) else said), self.model.info.eos_token_ids[0]]
        assert request.sampling.max_tokens is not None
        tokens = tokens[: request.sampling.max_tokens]
        for start in range(0, len(tokens), self.step):
            part = tokens[start : start + self.step]
            is_last = start + self.step >= len(tokens)
            logprobs = [TokenLogprobs([token, 7], [self.logprob(request), -9.0], [1, 2]) for token in part]
            output = EngineOutput(request.request_id, part, "stop" if is_last else None, logprobs=logprobs)
            if not start and request.sampling.prompt_logprobs is not None and self.tells_silence:
                output.prompt_logprobs = self._of_prompt(request.prompt_token_ids)
            yield output

    def _of_prompt(self, prompt: list[int]) -> list[TokenLogprobs | None]:
        """Silence behind the first mark, as likely as told, if nothing is likelier."""
        likely = self.id_of("nospeech") if self.no_speech > 0.5 else 7
        entry = TokenLogprobs([0, likely], [-9.0, math.log(max(self.no_speech, 1 - self.no_speech))], [2, 1])
        marked = prompt.index(self.id_of("startoftranscript"))
        return [entry if place == marked + 1 else None for place in range(len(prompt))]

    def _detected(self, request: EngineRequest, named: list[int]) -> EngineOutput:
        assert request.sampling.max_tokens == 1
        assert request.prompt_token_ids == [self.id_of("startoftranscript")]
        said = {self.id_of(self.hears): -0.2, self.id_of("nospeech"): math.log(self.no_speech)}
        entry = TokenLogprobs([5, *named], [-1.0, *(said.get(token, -8.0) for token in named)], [1] * (1 + len(named)))
        return EngineOutput(request.request_id, [5], "length", logprobs=[entry])
