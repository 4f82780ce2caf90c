"""A drafter drafts for its target alone; requests with an adapter get the adapter's tokens, some of them by drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.checkpoints.model_info import ModelInfo
from app.engine import control
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.adapter import AdapterAsk
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.adapters import pair, write_adapter
from tests.engine.core_driver import KEY, run
from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode import drafters
from tests.worker.spec_decode.test_chain import MAX_TOKENS, SHAPE, config_of, prompts
from tests.worker.worker_driver import decode_statically

pytestmark = pytest.mark.usefixtures("one_thread")


def generate(model: Path, adapter: Path, drafting: dict[str, Any] | None, *, static: bool) -> dict[str, list[int]]:
    config = config_of(model, drafting, enable_lora=True)
    executor = InProcessExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    try:
        if static:
            decode_statically(executor._worker, [1, 2, 4])
        control.run(core, "load_adapter", {"name": "own", "path": str(adapter)})
        ask = (AdapterAsk("own", AdapterFiles.read(adapter, 16).digest()),)
        params = [SamplingParams(temperature=t, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True) for t in (0.0, 0.8)]
        requests = [
            EngineRequest(f"{n} {i} {len(asks)}", prompt, params[i], choice_index=n, asks=asks)
            for n, prompt in enumerate(prompts())
            for i in range(2)
            for asks in ((), ask)
        ]
        return run(core, requests).tokens
    finally:
        core.shutdown()


@pytest.mark.parametrize("static", [False, True])
def test_tokens_of_an_adapter_are_its_own(tmp_path: Path, static: bool) -> None:
    model = tiny_model("llama", **SHAPE)
    torch.manual_seed(1)
    adapter = write_adapter(tmp_path / "adapter", {name: tensor * 0.5 for name, tensor in pair().items()})
    drafters.eagle3(tmp_path / "drafter", hf_model(model))
    plain = generate(model, adapter, None, static=static)
    assert plain["1 0 0"] != plain["1 0 1"], "the adapter changes nothing"
    for drafting in (
        {"method": "eagle3", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 3},
        {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3},
    ):
        assert generate(model, adapter, drafting, static=static) == plain
