"""`lora_request` of LLM: the tokens are PEFT's, and no block of the prefix cache is another adapter's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app import LLM, LoRARequest, SamplingParams
from app.checkpoints.model_info import ASSETS
from app.errors import CheckpointError, InvalidRequestError, ParameterError
from tests.adapters import pair, peft_adapter, write_adapter
from tests.tiny_models import hf_model, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 9, 200, 7, 3, 77, 130, 8, 21, 60, 61, 62, 63, 64, 65, 66, 67, 68]}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    targets = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    return [peft_adapter(tiny_model(), root / str(r), seed=r, scale=0.5, r=r, **targets) for r in (4, 8)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {
        "device": "cpu",
        "num_threads": 1,
        "num_blocks": 60,
        "max_num_seqs": 8,
        "tokenizer": str(ASSETS / "tiny-chat"),
    }
    with LLM(str(tiny_model()), enable_lora=True, max_loras=2, **options) as llm:
        yield llm


def peft_tokens(adapter: Path | None, count: int = 6) -> list[int]:
    from peft import PeftModel

    model = hf_model(tiny_model())
    ids = list(PROMPT["prompt_token_ids"])
    adapted = model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(adapted(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT["prompt_token_ids"]) :]


def test_each_prompt_has_its_own_adapter_and_its_own_blocks(llm: LLM, adapters: list[Path]) -> None:
    first, second = (LoRARequest(path.name, number + 1, str(path)) for number, path in enumerate(adapters))
    asked = [None, first, second, first]
    for _ in range(2):  # the second time from the prefix cache
        results = llm.generate([PROMPT] * 4, GREEDY, use_tqdm=False, lora_request=asked)
        tokens = [result.outputs[0].token_ids for result in results]
        assert tokens == [peft_tokens(None), *map(peft_tokens, (adapters[0], adapters[1], adapters[0]))]
    assert all(result.num_cached_tokens == 16 for result in results)
    (alone,) = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=second)
    assert alone.outputs[0].token_ids == tokens[2]


def test_a_directory_that_was_saved_anew_is_another_adapter(llm: LLM, adapters: list[Path], tmp_path: Path) -> None:
    for source in (adapters[0], adapters[1], adapters[0]):
        shutil.copytree(source, tmp_path / "own", dirs_exist_ok=True)
        own = LoRARequest("own", 9, str(tmp_path / "own"))
        (result,) = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=own)
        assert result.outputs[0].token_ids == peft_tokens(source)
    for known in llm.stats().adapters.known:
        llm.collective_rpc("unload_adapter", {"name": known.name})
    (result,) = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=own)
    assert result.outputs[0].token_ids == peft_tokens(adapters[0])


def test_what_cannot_be_is_refused_by_name(llm: LLM, adapters: list[Path], tmp_path: Path) -> None:
    one = LoRARequest("one", 1, str(adapters[0]))
    with pytest.raises(InvalidRequestError, match="a list with one for each of 2 prompts, not 1 of them"):
        llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False, lora_request=[one])
    with pytest.raises(InvalidRequestError, match="not str"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request="one")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="cannot read"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=LoRARequest("none", 1, str(tmp_path / "none")))
    large = LoRARequest("large", 1, str(write_adapter(tmp_path, pair(rank=17), r=17)))
    with pytest.raises(InvalidRequestError, match="more than max_lora_rank=16"):
        llm.generate(PROMPT, GREEDY, lora_request=large)
    for name, number in (("", 1), ("a", 0)):
        with pytest.raises(ParameterError):
            LoRARequest(name, number, "/somewhere")


def test_an_engine_without_adapters_says_how_to_have_them(adapters: list[Path]) -> None:
    with (
        LLM("tiny-chat", device="cpu", num_threads=1, num_blocks=20) as plain,
        pytest.raises(InvalidRequestError, match="enable_lora"),
    ):
        plain.generate("x", GREEDY, use_tqdm=False, lora_request=LoRARequest("one", 1, str(adapters[0])))


def test_the_built_in_models_own_adapter_changes_its_manner() -> None:
    own = ASSETS / "tiny-chat-pirate"
    assert sum(file.stat().st_size for file in own.iterdir()) <= 300_000
    messages = [[{"role": "user", "content": text}] for text in ("What is 12 + 30?", "What is the opposite of light?")]
    params = SamplingParams(temperature=0.0, max_tokens=30)
    with LLM("tiny-chat", enable_lora=True, device="cpu", num_threads=1, num_blocks=40, max_num_seqs=4) as llm:
        pirate = LoRARequest("pirate", 1, "tiny-chat-pirate")
        plain, adapted = (llm.chat(messages, params, use_tqdm=False, lora_request=own) for own in (None, pirate))
    texts = [result.outputs[0].text for result in plain]
    assert [result.outputs[0].text for result in adapted] == [f"Arr! {text.rstrip('.')}, matey!" for text in texts]
