"""Vectors of texts and pictures together: the last token's, as transformers' decoder has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.checkpoints.model_info import ASSETS
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from tests.models.multimodal.test_families_that_see import PROMPTS
from tests.tiny_media import IMAGE, MODELS, media_judge, prompt_of, tiny_media_model
from tests.worker.pooling.pooling_driver import PoolingDriver


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_vectors_are_those_of_transformers(name: str) -> None:
    directory, judge = tiny_media_model(name), media_judge(tiny_media_model(name)).model
    prompts = [prompt_of(name, parts) for parts in PROMPTS]
    options = {
        "runner": "pooling",
        "tokenizer": str(ASSETS / "tiny-chat"),
        "max_model_len": 256,
        "max_num_batched_tokens": 24,
    }
    with PoolingDriver(directory, **options, block_size=8, num_blocks=40, max_num_seqs=4) as driver:
        for turn in range(2):  # the second from the prefix cache, as far as it goes
            for i, (tokens, ask) in enumerate(prompts):
                params = PoolingParams(task="embed", use_activation=turn == 0)
                driver.core.add_request(EngineRequest(f"{turn}-{i}", tokens, params, asks=(ask,)))
            found = {}
            while driver.core.has_work():
                found |= {one.request_id: one.pooled.array() for one in driver.core.step() if one.pooled is not None}
            for i, (tokens, ask) in enumerate(prompts):
                ids = torch.tensor([tokens])
                seen = MODELS[name].judge(ask.items) if ask.items else {}
                with torch.inference_mode():
                    hidden = judge(input_ids=ids, **seen, mm_token_type_ids=(ids == IMAGE).long(), use_cache=False)
                expected = hidden.last_hidden_state[0, -1]
                expected = torch.nn.functional.normalize(expected, dim=0) if turn == 0 else expected
                np.testing.assert_allclose(found[f"{turn}-{i}"], expected.numpy(), atol=1e-3)
