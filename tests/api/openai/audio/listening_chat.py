"""Models that chat and transcribe by a prompt of their own: directories, a scripted engine behind them, and the texts
of a real engine and of transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import tokenizers
import torch

from app.api.server.app import create_app
from app.config.engine import EngineConfig
from app.config.limits import RequestLimits
from app.media.reader import MediaReader
from app.records.media import MediaAsk
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.text.chat_speech import ChatSpeech
from app.text.model_media import ModelMedia
from app.text.served_model import ServedModel
from tests import limits
from tests.api.conftest import ScriptedClient, Server
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.media.audio.sounds import Floats, file_of, noise, whole_numbers
from tests.media.sound_model import SOUND, write_talk
from tests.offline.test_sounds import heard
from tests.tiny_hearing import MELS, hearing_model, judge_of, told

URL = "/v1/audio/transcriptions"
NAME = "listener"
MAX_TOKENS = 128  # of the real engine: prompt and text
HALF = file_of(noise(0.5))
# Longer than is heard at once, as the tests have it: three pieces.
LONG = file_of(np.concatenate([noise(0.9, seed=i) * (i % 2) for i in range(1, 6)]))


def write_listener(path: Path, family: str, marks: Sequence[str], *, are_special: bool) -> Path:
    """Write the directory of a tiny random model whose tokenizer knows these marks, too."""
    path.mkdir()
    for file in hearing_model(family).iterdir():
        (path / file.name).symlink_to(file)
    write_talk(path, family, {"feature_size": MELS})
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    (backend.add_special_tokens if are_special else backend.add_tokens)([*marks])
    backend.save(str(path / "tokenizer.json"))
    return path


def hearing(model: ServedModel, reader: MediaReader) -> ServedModel:
    """The same model, which hears and transcribes."""
    model.media = ModelMedia.of(model.info, model.tokenizer, reader, EngineConfig())
    model.chat_speech = ChatSpeech.of(model.info, model.media, model.chat_template, model.tokenizer)
    assert model.chat_speech is not None
    return model


def post(http: httpx.Client, data: bytes = HALF, **fields: Any) -> Any:
    """One request's answer."""
    return http.post(URL, data={"model": NAME, **fields}, files={"file": data})


class Listener(ScriptedClient):
    """Says `answer(request)` of a sound, which must stand where the prompt has its placeholders."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self.model = model

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.model.tokenizer.encode(text, add_special_tokens=False)

    def prompt_of(self, request: EngineRequest) -> str:
        """A request's prompt without the sound."""
        kept = [token for token in request.prompt_token_ids if token != SOUND]
        return self.model.tokenizer.decode(kept, False)

    def answer(self, request: EngineRequest) -> Iterator[EngineOutput]:
        """Outputs for one request; a model's own."""
        raise NotImplementedError

    def _outputs(self, model: ServedModel, request: EngineRequest) -> Iterator[EngineOutput]:
        ask = request.asked(MediaAsk)
        assert ask is not None
        (item,) = ask.items
        assert request.prompt_token_ids[item.offset : item.offset + item.length] == [SOUND] * item.length
        return self.answer(request)


def check_text(
    directory: Path, reader: MediaReader, family: str, before: str, behind: str, num_places: int, silent: Sequence[str]
) -> None:
    """Check the text of half a second in English, by a real engine and OpenAI's client, against transformers' greedy
    one; `silent`: marks that are no text."""
    engine = EngineInThisProcess(str(directory), dtype="float32", max_model_len=MAX_TOKENS)
    (model,) = engine.models.values()
    hearing(model, reader)
    model.max_model_len = MAX_TOKENS
    wave, tokenizer = noise(0.5, seed=7), model.tokenizer
    text = _transcribed(engine, str(directory), wave)
    engine.engine.shutdown()
    placeholder = tokenizer.id_to_token(SOUND)
    assert placeholder is not None
    prompt = tokenizer.encode(f"{before}{placeholder * num_places}{behind}", False)
    said = _judged(family, prompt, wave, model.info.eos_token_ids)
    left_out = {*tokenizer.special_token_ids, *map(tokenizer.token_to_id, silent), model.info.eos_token_ids[0]}
    assert text == tokenizer.decode([token for token in said if token not in left_out], True).strip()
    assert len(said) > 3


def _transcribed(engine: EngineInThisProcess, model: str, wave: Floats) -> str:
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s()}
    file = io.BytesIO(file_of(wave))
    file.name = "a.wav"
    with Server(create_app(engine, RequestLimits())) as server:
        transport = openai.DefaultHttpxClient(verify=False)
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", http_client=transport, **own)
        return sdk.audio.transcriptions.create(file=file, model=model, language="en", response_format="json").text


def _judged(family: str, prompt: list[int], wave: Floats, ends: Sequence[int]) -> list[int]:
    seen = told(family, [heard(family, whole_numbers(wave[:, 0]).astype(np.float32) / 32_768)])
    said: list[int] = []
    while len(prompt) + len(said) < MAX_TOKENS and (not said or said[-1] not in ends):
        ids = torch.tensor([prompt + said])
        with torch.inference_mode():
            logits = judge_of(family)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **seen)
        said.append(int(logits.logits[0, -1].argmax()))
    return said
