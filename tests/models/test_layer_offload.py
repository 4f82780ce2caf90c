"""Weights in host memory, copied into a ring of buffers ahead of their use: the tokens are those without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS, ModelInfo
from app.config.engine import EngineConfig
from app.distributed.parallel_groups import ParallelGroups
from app.errors import ConfigError, InvalidRequestError
from app.kernels.attention.reference import OPS
from app.layers.context import BuildContext
from app.loading.loader import load_model
from app.models.decoder import CausalLM
from app.models.layer_offload import LayerOffload, spread
from app.worker.placement import offload_bytes
from app.worker.worker import Worker
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

CPU = torch.device("cpu")
LAYERS = 7
PROMPTS = [[5, 9, 200, 31], [7] * 30, list(range(3, 40))]


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("llama", num_hidden_layers=LAYERS)


def layer_bytes(directory: Path) -> int:
    """Of one layer's products, in fp32."""
    hf = json.loads((directory / "config.json").read_text())
    size, heads, kv = hf["hidden_size"], hf["num_attention_heads"], hf["num_key_value_heads"]
    head_dim = hf.get("head_dim") or size // heads
    return 4 * size * (head_dim * (2 * heads + 2 * kv) + 3 * hf["intermediate_size"])


@pytest.fixture
def on_a_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A CPU's worker keeps so many bytes of weights apart: copies are plain ones, all else is as on a GPU."""

    def allow(num_bytes: int) -> None:
        monkeypatch.setattr("app.worker.placement.offload_bytes", lambda *_, **__: num_bytes)

    return allow


@pytest.mark.parametrize("num_layers", [1, 3, LAYERS])
def test_tokens_equal_transformers(directory: Path, on_a_host: Callable[[int], None], num_layers: int) -> None:
    on_a_host(num_layers * layer_bytes(directory))
    judge = hf_model(directory)
    driver = Driver(str(directory), chunk=20)
    info = driver.info
    assert any(note.startswith(f"weights in host memory: {num_layers} of {LAYERS} layers") for note in info.notes)
    runs = driver.run([Run(prompt, greedy(6)) for prompt in PROMPTS])
    assert [run.tokens for run in runs] == [hf_greedy(judge, prompt, 6) for prompt in PROMPTS]


def test_a_step_reads_no_buffer_before_its_copy_and_copies_into_none_that_is_still_read(directory: Path) -> None:
    """The order of copies and layers; and the weights take the memory of the ring alone."""
    ctx = BuildContext(torch.float32, CPU, 64, OPS, ParallelGroups(), offload_bytes=4 * layer_bytes(directory))
    model = load_model(ModelInfo.from_directory(str(directory)), ctx, "auto", 0)
    assert isinstance(model, CausalLM)
    offload = model.offload
    assert offload is not None
    streamed = [layer for layer in model.model.layers.values() if layer.self_attn.qkv_proj.is_streamed]
    assert len({layer.self_attn.qkv_proj.weight.untyped_storage().data_ptr() for layer in streamed}) == 2
    order: list[tuple[str, int]] = []
    copy, run = offload._copy, offload._run
    offload._copy = lambda number: (order.append(("copy", number)), copy(number))[1]  # type: ignore[method-assign, assignment]
    for index, call in enumerate(offload._calls):
        if hasattr(call, "func"):
            number = call.args[0]
            offload._calls[index] = lambda number=number: (order.append(("run", number)), run(number, lambda: None))
    for call in offload.begin():
        if not isinstance(call, torch.nn.Module):
            call()
    offload.end()
    assert order == [
        ("copy", 0), ("copy", 1), ("run", 0), ("copy", 2), ("run", 1), ("copy", 3), ("run", 2), ("run", 3),
    ]  # fmt: skip


def test_layers_are_spread_and_the_last_is_one_of_them() -> None:
    assert spread([10] * 8, 1) == [7]
    assert spread([10] * 8, 11) == [3, 7]
    assert spread([10] * 8, 30) == [2, 5, 7]
    assert spread([10] * 8, 1000) == list(range(8))


def test_where_it_makes_no_sense_it_is_refused_by_name(
    directory: Path, on_a_host: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cpu_offload_gb=2: a CPU's weights lie in host memory anyway") as refused:
        Worker(EngineConfig(model=str(directory), device="cpu", cpu_offload_gb=2)).start()
    assert refused.value.param == "cpu_offload_gb"
    config = EngineConfig(model=str(directory), cpu_offload_gb=0.5)
    assert offload_bytes(config, torch.device("cuda"), quantized=False) == 1 << 29
    with pytest.raises(ConfigError, match=r"cpu_offload_gb=0\.5: quantized weights are not streamed yet"):
        offload_bytes(config, torch.device("cuda"), quantized=True)
    on_a_host(1)
    worker = Worker(EngineConfig(model=str(directory), device="cpu", num_threads=1, num_blocks=4))
    worker.start()
    for call in (lambda: worker.begin_update(True), lambda: worker.sleep(2), lambda: worker.check_weights("")):
        with pytest.raises(InvalidRequestError, match="is not supported with cpu_offload_gb"):
            call()
    worker.shutdown()


def test_more_than_the_host_has_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerOffload, "num_bytes", 1 << 60)
    ctx = BuildContext(torch.float32, CPU, 64, OPS, ParallelGroups(), offload_bytes=1)
    with pytest.raises(ConfigError, match=r"cpu_offload_gb: \d+ bytes are more than this machine has"):
        load_model(ModelInfo.from_directory(str(directory)), ctx, "auto", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", ["on", "off"])
def test_on_a_gpu(directory: Path, cuda_graphs: Any) -> None:
    """From captured copies, and from those of steps that are not."""
    judge = hf_model(directory)
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "num_blocks": 64, "max_model_len": 128}
    offloaded = 4 * layer_bytes(directory) / (1 << 30)
    with LLM(
        str(directory), tokenizer=str(ASSETS / "tiny-chat"), device="cuda", cuda_graphs=cuda_graphs,
        cpu_offload_gb=offloaded, **options,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        answers = llm.generate(PROMPTS, params, use_tqdm=False)
    found = [list(answer.outputs[0].token_ids) for answer in answers]
    assert found == [hf_greedy(judge, prompt, 20) for prompt in PROMPTS]
