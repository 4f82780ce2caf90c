"""Drafters of whole blocks: drafts are those of a plain reference, and tokens those of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from app.errors import ConfigError
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.spec_decode import drafters
from tests.worker.spec_decode.test_chain import COUNT, MAX_TOKENS, SHAPE, config_of, prompts, run_greedy
from tests.worker.worker_driver import Driver

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS = ("dflash", "dflash-windows", "dflash2", "dspark", "speculators")


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("llama", **SHAPE)


@pytest.fixture(scope="module")
def target(directory: Path) -> PreTrainedModel:
    return hf_model(directory)


def drafting(folder: Path, form: str, count: int | None = COUNT) -> dict[str, Any]:
    method = "dspark" if form == "dspark" else "dflash"
    return {"method": method, "model": str(folder), "num_speculative_tokens": count}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_the_reference(
    directory: Path, target: PreTrainedModel, tmp_path: Path, form: str, static: bool
) -> None:
    """Of a request's first drafts and its last none is compared: there is no block yet, or none any more, that all
    masks could have their keys in."""
    reference = drafters.block(tmp_path, target, form)
    answers, spy = run_greedy(config_of(directory, drafting(tmp_path, form)), static=static)
    assert answers == [hf_greedy(target, prompt, MAX_TOKENS) for prompt in prompts()]
    num_checked = 0
    for known, own in spy.seen:
        prompt = max((p for p in prompts() if known[: len(p)] == p), key=len)
        if len(prompt) + 1 < len(known) < len(prompt) + MAX_TOKENS - COUNT:
            assert own == reference(known, COUNT), len(known)
            num_checked += 1
    assert num_checked >= 20


@pytest.mark.parametrize(("form", "most"), [("dflash", 7), ("dspark", 5)])
def test_left_out_the_number_of_drafts_is_what_a_block_holds(
    directory: Path, target: PreTrainedModel, tmp_path: Path, form: str, most: int
) -> None:
    drafters.block(tmp_path, target, form)
    asked = drafting(tmp_path, form, None)
    info = Driver(str(directory), num_blocks=8, max_model_len=32, speculative_config=asked).info
    assert (info.num_draft_tokens, info.num_draft_slots) == (most, most + (form == "dflash"))


def test_more_drafts_than_a_block_holds_are_refused(directory: Path, target: PreTrainedModel, tmp_path: Path) -> None:
    drafters.block(tmp_path, target)
    with pytest.raises(ConfigError, match="at most those of its block is 7 of the drafter, 8 of the target"):
        Driver(str(directory), num_blocks=8, max_model_len=32, speculative_config=drafting(tmp_path, "dflash", 8))
