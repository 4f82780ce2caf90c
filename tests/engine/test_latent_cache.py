"""A cache of latents, which have no planes of keys and values, in a whole engine: prefixes, chunks, preemption, the
host tier, fp8, sleep, sharded state, steps over static tensors. The judge is transformers."""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError
from app.worker.save_sharded import save_sharded
from tests.kernels.gemm.test_fp8 import nearest_e4m3
from tests.models.families.expert_variants import LATENT
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, decode_statically, greedy

MAX_TOKENS = 8
SCALES = (0.004, 0.05)  # of the layers' latents: the first clamps beyond 1.8, the second rounds finely
WIDTH, LAYERS = 64 + 8, 2


class RoundedCache(DynamicCache):
    """transformers' cache of latents and rotated keys, rounded in NumPy on the way in."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **more: Any) -> Any:
        scale = SCALES[layer_idx]
        states = (
            torch.from_numpy(nearest_e4m3((x / torch.tensor(scale)).double().numpy())).float() * scale
            for x in (key_states, value_states)
        )
        return super().update(*states, layer_idx, *rest, **more)


@functools.cache
def directory() -> Path:
    """A random model whose checkpoint holds SCALES: one for all in the first layer; the second has one for what it
    calls values too, which is smaller."""
    plain = tiny_model("youtu", **LATENT)
    copy = Path(shutil.copytree(plain, plain.with_name(f"{plain.name}-scaled")))
    scales = {"0.self_attn.kv_scale": SCALES[0], "1.self_attn.k_scale": SCALES[1], "1.self_attn.v_scale": 0.002}
    tensors = {f"model.layers.{name}": torch.tensor(scale) for name, scale in scales.items()}
    save_file({**load_file(copy / "model.safetensors"), **tensors}, copy / "model.safetensors")
    return copy


@functools.cache
def prompts() -> list[list[int]]:
    """Half of them share a prefix; some are expanded (from 18 tokens on), others absorbed."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 331) for _ in range(40)]
    ends = [[rng.randrange(3, 331) for _ in range(1 + 9 * i)] for i in range(8)]
    return [shared + end if i % 2 else end for i, end in enumerate(ends)]


@functools.cache
def judged(*, rounded: bool = False) -> list[list[int]]:
    model = hf_model(directory())
    if not rounded:
        return [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts()]
    answers = []
    for prompt in prompts():
        cache, token_ids, answer = RoundedCache(config=model.config), prompt, []
        for _ in range(MAX_TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits
            answer.append(int(logits[0, -1].argmax()))
            token_ids = answer[-1:]
        answers.append(answer)
    return answers


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def engine(**options: Any) -> LLM:
    common = {"tokenizer": str(ASSETS / "tiny-chat"), "device": "cpu", "num_threads": 1, "max_num_seqs": 8}
    return LLM(str(options.pop("model", directory())), **{**common, "block_size": 8, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},  # all absorbed
        {"num_blocks": 24},  # some are preempted
        {"num_blocks": 24, "kv_host_memory_bytes": 1 << 20},
    ],
    ids=lambda options: ",".join(options),
)
def test_chunks_prefix_hits_preemption_and_the_host_tier(options: dict[str, Any]) -> None:
    with engine(**options) as llm:
        assert tokens(llm) == judged()
        assert tokens(llm) == judged()  # now partly from the cache


def test_a_quantized_cache() -> None:
    with engine(kv_cache_dtype="fp8", num_blocks=64) as llm:
        notes = llm.worker_info.notes
        assert any(f"({64 * 8 * WIDTH * LAYERS / (1 << 20):.1f} MiB, fp8)" in note for note in notes), notes
        assert "KV cache scales: from the checkpoint, in 2 of 2 layers" in notes
        assert tokens(llm) == judged(rounded=True)
        assert tokens(llm) == judged(rounded=True)
    assert judged() != judged(rounded=True), "the rounding should show"


def test_a_layer_has_one_scale(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(directory(), tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.k_scale": torch.ones(4)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_scale in .* has shape \[4\], not one number for the layer's latents"):
        Driver(str(copy), kv_cache_dtype="fp8")


def test_steps_over_static_tensors() -> None:
    """What a GPU captures: all absorbed, at sizes larger than the step."""
    driver = Driver(str(directory()), max_model_len=128)
    decode_statically(driver.worker, [1, 4, 16])
    runs = driver.run([Run(prompt, greedy(MAX_TOKENS)) for prompt in prompts()])
    assert [run.tokens for run in runs] == judged()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(level: int) -> None:
    with engine() as llm:
        assert tokens(llm) == judged()
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")
        assert tokens(llm) == judged()


def test_weights_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers stream theirs, that of keys and values of heads too, which is read in two ways."""
    monkeypatch.setattr("app.worker.placement.offload_bytes", lambda *_, **__: 1 << 30)
    with engine() as llm:
        assert any(note.startswith("weights in host memory: 2 of 2 layers") for note in llm.worker_info.notes)
        assert tokens(llm) == judged()


def test_each_rank_reads_its_own_file(tmp_path: Path) -> None:
    save_sharded(EngineConfig(model=str(directory())), tmp_path / "out")
    with engine(model=tmp_path / "out", kv_cache_dtype="fp8") as llm:
        assert tokens(llm) == judged(rounded=True)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cascade_attention=on"):
        Driver(str(directory()), cascade_attention="on")
