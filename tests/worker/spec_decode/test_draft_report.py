"""Rows with a grammar draft too: the tokens are those without drafts, in fewer steps.

The proposer (prophet.py) knows the answers but for every fifth position, where it says what a grammar mostly forbids.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from app.backends import PROPOSERS
from app.offline.llm import LLM
from app.records.sampling_params import SamplingParams
from tests.structured.test_in_engine import GRAMMARS, OPTIONS, TOKENIZER, params
from tests.tiny_models import tiny_model
from tests.worker.spec_decode.prophet import ASKED, ENTRY, NAME, key_of, model_with_prophet
from tests.worker.worker_driver import decode_statically

NAMES = ["json-flat", "regex-words", "choice-2", "grammar-sql", "json-enum", "json-date-uuid"]
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "num_blocks": 160}


def wishes() -> list[SamplingParams]:
    """Every second one with a grammar; one that thinks of other rules, too."""
    made = []
    for seed, name in enumerate(NAMES):
        made.append(params(GRAMMARS[name][0], seed, max_tokens=48, logprobs=1 if seed % 3 == 0 else None))
        made.append(params(None, seed, max_tokens=24, ignore_eos=True))
    made.append(params(GRAMMARS["json-nested"][0], 9, max_tokens=40, min_tokens=9, repetition_penalty=1.2))
    return made


def generate(model: Path, *, static: bool = False, **options: Any) -> tuple[dict[str, list[int]], list[Any], int]:
    """Answers by what the prophet looks them up with; texts, ends and logprobs; how many steps it took."""
    with LLM(str(model), tokenizer=TOKENIZER, **{**OPTIONS, **SIZES, **options}) as llm:
        if static:
            decode_statically(llm._core.executor._worker, [1, 2, 4, 8])  # type: ignore[attr-defined]
        asked = wishes()
        found = llm.generate([f"Answer {n}: " for n in range(len(asked))], asked, use_tqdm=False)
        answers = {key_of(0, list(one.prompt_token_ids or ())): list(one.outputs[0].token_ids) for one in found}
        told = [
            (one.outputs[0].text, one.outputs[0].finish_reason, len(one.outputs[0].logprobs or ())) for one in found
        ]
        return answers, told, llm._core.stats().steps_total


@pytest.mark.parametrize("static", [False, True])
def test_tokens_are_those_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, static: bool) -> None:
    model = tiny_model(vocab_size=1100, eos_token_id=2, max_position_embeddings=1024)
    answers, told, num_steps = generate(model)
    assert {end for _, end, _ in told} >= {"stop", "length"}
    monkeypatch.syspath_prepend(str(tmp_path / "model"))
    monkeypatch.setitem(PROPOSERS._table, NAME, ENTRY)
    monkeypatch.delitem(sys.modules, "prophet_proposer", raising=False)
    again, also_told, fewer = generate(
        model_with_prophet(model, tmp_path, answers), static=static, speculative_config=ASKED
    )
    assert again == answers
    assert also_told == told
    assert fewer < 0.75 * num_steps
