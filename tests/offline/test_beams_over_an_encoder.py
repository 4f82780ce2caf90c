"""`LLM.beam_search` where an encoder reads the prompt (BART), with transformers' beam search as the judge."""

from __future__ import annotations

import torch

from app import LLM, BeamSearchParams
from app.checkpoints.model_info import ASSETS
from tests.models.multimodal.test_bart import TEXTS, judge, tiny_bart

WIDTH, TOKENS = 2, 6


def test_beams_are_those_of_transformers() -> None:
    text = TEXTS[2]
    found = judge().generate(
        torch.tensor([text]), num_beams=WIDTH, num_return_sequences=WIDTH, min_new_tokens=TOKENS + 1,
        max_new_tokens=TOKENS + 1, forced_bos_token_id=0, forced_eos_token_id=None, do_sample=False,
    )  # fmt: skip
    options = {"device": "cpu", "num_threads": 1, "num_blocks": 64, "max_model_len": 48, "max_num_seqs": 8}
    with LLM(str(tiny_bart()), tokenizer=str(ASSETS / "tiny-chat"), **options) as llm:
        params = BeamSearchParams(beam_width=WIDTH, max_tokens=TOKENS, ignore_eos=True)
        [output] = llm.beam_search([{"prompt_token_ids": text}], params)
    answers = [beam.tokens[len(text) :] for beam in output.sequences]
    assert answers == [row[2:].tolist() for row in found]
