from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from app.checkpoints.model_info import ModelInfo
from app.cli.batch.local_engine import LocalEngine
from app.config.engine import EngineConfig
from app.config.media import MediaConfig
from app.config.speculative import SpeculativeConfig
from app.deployments.replica.engine_factory import create_engine
from app.engine.default_drafter import with_default_drafter
from app.errors import ConfigError
from app.offline.llm import LLM
from app.offline.metrics import Counter
from app.records.sampling_params import SamplingParams
from tests.tiny_models import hf_greedy
from tests.worker.spec_decode.mtp_checkpoints import with_layer_behind

PROMPT = [5, 9, 200, 31]
TOKENIZER = str(ModelInfo.from_directory("tiny-chat").directory)
SIZES: dict[str, Any] = {"max_model_len": 96, "num_blocks": 32, "max_num_seqs": 4, "num_threads": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model with such a layer, and the model alone."""
    directory, alone, _ = with_layer_behind("glm4_moe", tmp_path_factory.mktemp("mtp"))
    return directory, alone


def chosen(directory: Path, **options: Any) -> EngineConfig:
    config = EngineConfig(model=str(directory), **options)
    return with_default_drafter(config, ModelInfo.of(config))


def test_it_drafts_where_nobody_says_anything(
    checkpoint: tuple[Path, PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "manta.engine")
    directory, alone = checkpoint
    config = chosen(directory)
    assert config.speculative_config == SpeculativeConfig(method="mtp"), "k follows the cost"
    assert "null turns it off" in caplog.text
    with LLM(str(directory), tokenizer=TOKENIZER, **SIZES) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        assert llm.worker_info.num_draft_tokens == 7
        counted = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
        assert counted["vllm:spec_decode_num_draft_tokens"] > 0
    assert answer.outputs[0].token_ids == hf_greedy(alone, PROMPT, 40)


@pytest.mark.parametrize("said", [None, {"method": "ngram"}, {"method": "mtp", "num_speculative_tokens": 1}])
def test_the_users_word_stays(checkpoint: tuple[Path, PreTrainedModel], said: dict[str, Any] | None) -> None:
    given = EngineConfig(model=str(checkpoint[0]), speculative_config=said)
    assert with_default_drafter(given, ModelInfo.of(given)) == given


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"deterministic": "batch", "num_threads": 1}, "deterministic=batch"),
        ({"runner": "pooling"}, "runner=pooling"),
        ({"model_impl": "transformers"}, "model_impl=transformers"),
        ({"pipeline_parallel_size": 2, "executor": "local_processes"}, "pipeline_parallel_size=2"),
        ({"load_format": "dummy"}, "not known before it is loaded"),
    ],
)
def test_what_it_does_not_go_with_leaves_it_off(
    checkpoint: tuple[Path, PreTrainedModel], caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    caplog.set_level(logging.INFO, "manta.engine")
    assert chosen(checkpoint[0], **options).speculative_config is None
    (line,) = caplog.messages
    assert reason in line


def test_a_checkpoint_that_lost_the_layer_serves_as_before(
    checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "manta.engine")
    shutil.copytree(checkpoint[0], tmp_path, dirs_exist_ok=True)
    kept = {name: each for name, each in load_file(tmp_path / "model.safetensors").items() if "eh_proj" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    assert chosen(tmp_path).speculative_config is None
    assert "the checkpoint has no tensor of it for eh_proj" in caplog.text


def test_a_start_that_has_no_room_for_it_goes_on_without(
    checkpoint: tuple[Path, PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of two layers' keys and values fit, those of three do not; whoever asks for it hears so."""
    sizes = {**SIZES, "num_blocks": None, "kv_cache_memory_bytes": 60_000, "tokenizer": TOKENIZER}
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        LLM(str(checkpoint[0]), **sizes, speculative_config={"method": "mtp"})
    with LLM(str(checkpoint[0]), **sizes) as llm:
        assert llm.config.speculative_config is None
        assert llm.worker_info.num_draft_tokens == 0
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0.0, max_tokens=9))
    assert answer.outputs[0].token_ids == hf_greedy(checkpoint[1], PROMPT, 9)
    assert "goes on without the model's own drafter: the KV cache can have" in caplog.text


def test_a_layer_of_other_shapes_is_left_out(
    checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(checkpoint[0], tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.2.eh_proj.weight"] = stored["model.layers.2.eh_proj.weight"][:, 1:].contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), tokenizer=TOKENIZER, **SIZES) as llm:
        assert llm.config.speculative_config is None
    assert "eh_proj" in caplog.text


def test_a_model_without_such_a_layer_has_none(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(Path("tiny-chat")).speculative_config is None
    assert not caplog.messages


def test_a_replica_and_the_batch_command_ask(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    config = EngineConfig(model=str(checkpoint[0]), tokenizer=TOKENIZER, executor="in_process", **SIZES)
    nobody: Any = None
    replica: Any = create_engine(config, bytes(32), nobody, nobody, nobody, nobody)
    local: Any = LocalEngine(config, None, MediaConfig())
    try:
        for engine in (replica, local.engine):
            assert engine._core.config.speculative_config == SpeculativeConfig(method="mtp")
    finally:
        local.shutdown()
