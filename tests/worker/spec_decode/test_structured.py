"""Structured outputs stay valid with every drafter: 10,000 of each in `make acceptance`, a thousand a test; few in CI.

Random weights choose among what a grammar allows, so drafts are right where it leaves little choice, and cut where it
forbids them. Judges are those of tests/structured/grammars.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.backends import PROPOSERS
from app.checkpoints.model_info import ModelInfo
from app.offline.llm import LLM
from app.offline.metrics import Counter
from app.records.sampling_params import SamplingParams
from tests.structured.grammars import MAX_TOKENS, all_grammars
from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode import drafters
from tests.worker.spec_decode.mtp_checkpoints import SHAPES, with_layer_behind
from tests.worker.spec_decode.test_chain import MADE, SHAPE

TOKENIZER = str(ModelInfo.from_directory("tiny-chat").directory)
GRAMMARS = all_grammars()
TEMPERATURES = (0.0, 0.7, 1.0, 1.4)
COUNT = 1000  # outputs of a long test
VOCAB = (
    1100  # more than the tokenizer has: where text is forced, a grammar allows the tokenizer's own tokens of it alone
)
BLOCKS: dict[str, Callable[[Path, Any], object]] = {
    "dflash": drafters.block,
    "dspark": lambda folder, target: drafters.block(folder, target, "dspark"),
}
WITH_CHECKPOINT = {"eagle3": MADE["eagle3"][1], "eagle": MADE["eagle"][1], "medusa": MADE["medusa"][1]}
WITH_CHECKPOINT |= {"mlp_speculator": MADE["mlp"][1], **BLOCKS}
SAMPLE = ("draft_model", "mtp", "dspark")  # of CI: right often, with experts, in blocks
DRAFTERS = ("ngram", "suffix", "draft_model", "mtp", *WITH_CHECKPOINT)


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters and targets of as many tokens."""
    monkeypatch.setattr(drafters, "VOCAB", VOCAB)
    for sizes in (drafters.CONFIG, SHAPES["glm4_moe"].shape):
        monkeypatch.setitem(sizes, "vocab_size", VOCAB)


def test_the_list_is_whole() -> None:
    assert set(DRAFTERS) == set(PROPOSERS._table)


def engine(drafter: str, folder: Path) -> LLM:
    """An engine that drafts four tokens a step."""
    asked: dict[str, Any] = {"method": drafter, "num_speculative_tokens": 4}
    if drafter == "mtp":
        model = with_layer_behind("glm4_moe", folder / "model")[0]
    else:
        model = tiny_model("llama", vocab_size=VOCAB, **SHAPE)
    if drafter in ("ngram", "suffix"):
        asked |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4} if drafter == "ngram" else {}
    elif drafter == "draft_model":
        asked["model"] = str(model)
    elif drafter in WITH_CHECKPOINT:
        WITH_CHECKPOINT[drafter](folder / "drafter", hf_model(model))
        asked["model"] = str(folder / "drafter")
    sizes = {"max_model_len": 480, "num_blocks": 4000, "block_size": 8, "max_num_seqs": 64, "num_threads": 1}
    return LLM(str(model), tokenizer=TOKENIZER, speculative_config=asked, **sizes)


def check(drafter: str, folder: Path, first: int, count: int) -> None:
    """Outputs number `first` and on: each has its seed, and grammars and temperatures take turns."""
    names = list(GRAMMARS)
    wanted = [(names[i % len(names)], i) for i in range(first, first + count)]
    params = [
        SamplingParams(
            temperature=TEMPERATURES[seed % len(TEMPERATURES)],
            max_tokens=MAX_TOKENS,
            seed=seed,
            structured_outputs=GRAMMARS[name][0],
        )
        for name, seed in wanted
    ]
    with engine(drafter, folder) as llm:
        answers = llm.generate([f"Answer {seed % 7}: " for _, seed in wanted], params, use_tqdm=False)
        counted = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
    wrong = []
    for (name, seed), answer in zip(wanted, answers, strict=True):
        output = answer.outputs[0]
        if output.finish_reason != "stop" or not GRAMMARS[name][1](output.text):
            wrong.append((name, seed, output.finish_reason, output.text[:200]))
    assert not wrong, f"{len(wrong)} of {len(wanted)}: {wrong[:5]}"
    assert counted["vllm:spec_decode_num_draft_tokens"] > 0


@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in DRAFTERS]
)
def test_a_sample(drafter: str, tmp_path: Path) -> None:
    check(drafter, tmp_path, 0, len(GRAMMARS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 10 * COUNT, COUNT))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ten_thousand(drafter: str, first: int, tmp_path: Path) -> None:
    check(drafter, tmp_path, len(GRAMMARS) + first, COUNT)
