"""Sleep, wake and new weights over real workers: the tokens are transformers' own, before and after."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app import LLM, SamplingParams
from app.checkpoints.model_info import ModelInfo
from app.distributed.weight_transfer import WeightSender
from app.errors import CheckpointError, EngineAsleepError, InvalidRequestError, UnsupportedError
from tests import limits
from tests.tiny_models import hf_model, tiny_model

PROMPTS = ([5, 6, 7, 8] * 8, [9, 10, 11])
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
Make = Callable[..., LLM]


def answers(llm: LLM) -> list[list[int]]:
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done]


def expected(directory: Path) -> list[list[int]]:
    """Greedy tokens of transformers."""
    model = hf_model(directory)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def old() -> Path:
    return tiny_model("qwen3", 3)


@pytest.fixture(scope="module")
def new() -> Path:
    return tiny_model("qwen3", 4)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[LLM] = []
    tokenizer = str(ModelInfo.from_directory("tiny-chat").directory)

    def create(model: Path, **options: Any) -> LLM:
        made.append(LLM(str(model), device="cpu", num_threads=1, num_blocks=64, tokenizer=tokenizer, **options))
        return made[-1]

    yield create
    for llm in made:
        llm.shutdown()


def num_bytes(llm: LLM) -> int:
    """Memory of weights and KV cache of the one worker."""
    worker = llm._core.executor._worker  # type: ignore[attr-defined]
    tensors = [*(one.data for one in worker._parts.model.parameters()), *worker._parts.cache.tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if not tensor.is_meta)


@pytest.mark.parametrize("ranks", [1, 2])
def test_asleep_and_awake_again(make: Make, old: Path, new: Path, ranks: int) -> None:
    llm, before, after = make(old, tensor_parallel_size=ranks), expected(old), expected(new)
    assert answers(llm) == before != after
    revision = llm.stats().model_revision
    for level in (1, 2):
        llm.sleep(level)  # type: ignore[arg-type]
        assert llm.stats().sleep_level == level
        with pytest.raises(EngineAsleepError, match=f"level {level}"):
            answers(llm)
        if ranks == 1 and level == 2:
            assert num_bytes(llm) == 0
        llm.wake_up(["weights"])
        with pytest.raises(EngineAsleepError, match="asleep"):
            answers(llm)
        llm.wake_up()
        if level == 2:
            with pytest.raises(EngineAsleepError, match="no weights"):
                answers(llm)
            llm.collective_rpc("reload_weights")
        assert llm.stats().sleep_level == 0
        assert answers(llm) == before
    assert llm.stats().model_revision == revision
    llm.collective_rpc("update_weights", {"path": str(new)})
    assert answers(llm) == after
    assert llm.stats().model_revision != revision
    llm.collective_rpc("reload_weights")
    assert answers(llm) == before
    assert llm.stats().model_revision == revision
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_a_drafter_sleeps_with_its_target(make: Make, old: Path) -> None:
    """Its weights come back at both levels, though a checkpoint brings the target's alone."""
    drafting = {"method": "draft_model", "model": str(old), "num_speculative_tokens": 3}
    llm, before = make(old, speculative_config=drafting), expected(old)
    worker = llm._core.executor._worker  # type: ignore[attr-defined]
    (drafter,) = worker._parts.features.models

    assert answers(llm) == before
    usual = llm.stats().figures["accepted_tokens"]
    assert usual > 8
    llm.sleep(2)
    assert not any(one.untyped_storage().nbytes() for one in drafter.parameters())
    llm.wake_up()
    llm.collective_rpc("reload_weights")
    assert answers(llm) == before
    assert llm.stats().figures["accepted_tokens"] == 2 * usual


def test_what_does_not_fit_changes_nothing(make: Make, old: Path, tmp_path: Path) -> None:
    llm, before = make(old), expected(old)
    wide = tiny_model("qwen3", 4, intermediate_size=128)
    with pytest.raises(InvalidRequestError, match="another model: intermediate_size is 128, here 112"):
        llm.collective_rpc("update_weights", {"path": str(wide)})
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text((old / "config.json").read_text())
    with pytest.raises(CheckpointError, match="holds no weights"):
        llm.collective_rpc("update_weights", {"path": str(half)})
    with pytest.raises(UnsupportedError, match="unknown control call 'start'"):
        llm.collective_rpc("start")
    assert answers(llm) == before


def test_work_for_a_paused_engine_is_refused(make: Make, old: Path) -> None:
    """In one process nobody else could resume it; results without an end would look like answers."""
    llm, before = make(old), expected(old)
    llm.collective_rpc("pause")
    with pytest.raises(EngineAsleepError, match=r"stands still \(pause\)"):
        answers(llm)
    llm.collective_rpc("resume")
    assert answers(llm) == before


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
def test_tensors_as_a_trainer_gives_them(make: Make, old: Path, new: Path, options: dict[str, Any]) -> None:
    """One by one, ended by `reset_prefix_cache`; a layer of which a part is missing is noticed."""
    fresh = answers(make(new, **options))
    llm = make(old, **options)
    weights = load_file(new / "model.safetensors")
    for pair in weights.items():
        llm.load_weights([pair])
    llm.reset_prefix_cache()
    assert answers(llm) == fresh
    llm.load_weights(load_file(old / "model.safetensors").items())
    assert answers(llm) != fresh
    with pytest.raises(CheckpointError, match="the model has no strange"):
        llm.load_weights([("strange", torch.zeros(1))])
    if options:
        name = next(name for name in weights if "q_proj.weight" in name)
        llm = make(old, **options)
        llm.load_weights([(name, weights[name])])
        with pytest.raises(CheckpointError, match=r"the update lacks .*k_proj"):
            llm.reset_prefix_cache()
    with pytest.raises(EngineAsleepError, match="no weights"):
        answers(llm)
    llm.collective_rpc("reload_weights")
    answers(llm)


def test_weights_of_another_process(make: Make, old: Path, new: Path) -> None:
    """Broadcast by a sender to both ranks."""
    llm = make(old, tensor_parallel_size=2)
    weights = load_file(new / "model.safetensors")
    sender = WeightSender("127.0.0.1", 0, 3, timeout_s=limits.patience_s())
    sending = threading.Thread(target=lambda: sender.send(weights.values()))
    sending.start()
    address = {"master_address": "127.0.0.1", "master_port": sender.port, "rank_offset": 1, "world_size": 3}
    llm.collective_rpc("init_weight_transfer_engine", address)
    llm.collective_rpc("start_weight_update")
    told = {
        "names": list(weights),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }
    assert llm.collective_rpc("receive_weights", told) == len(weights)
    llm.collective_rpc("finish_weight_update", {"version": "1", "whole": True})
    sending.join()
    assert answers(llm) == expected(new)
