"""DPR's encoders, and a family that is XLM-RoBERTa under another name; transformers is the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DPRConfig, DPRContextEncoder, DPRQuestionEncoder, XLMRobertaConfig, XLMRobertaModel

from app.checkpoints.model_info import ASSETS
from app.errors import UnsupportedError
from tests.hf_logprobs import prompts
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 33))
SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 512, "max_position_embeddings": 130, "initializer_range": 0.3}


@pytest.mark.parametrize("kind", [DPRContextEncoder, DPRQuestionEncoder])
def test_vectors_of_dpr(tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(0)
    judge = kind(DPRConfig(**SIZES)).eval()
    judge.save_pretrained(tmp_path)
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        found = driver.pool(PROMPTS, task="embed")
    for prompt, vector in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            expected = judge(torch.tensor([prompt])).pooler_output[0]
        assert abs(float(expected.norm()) - 1) > 0.1, "it would not show that lengths are kept"
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_narrower_vectors_are_refused(tmp_path: Path) -> None:
    DPRContextEncoder(DPRConfig(**SIZES, projection_dim=16)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="projection_dim=16"):
        PoolingDriver(tmp_path, tokenizer=TOKENIZER)


def test_vectors_of_bilingual_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    judge = XLMRobertaModel(XLMRobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1)).eval()
    judge.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    own = {"architectures": ["BilingualModel"], "model_type": "bilingual"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        found = driver.pool(PROMPTS, task="token_embed", use_activation=False)
    for prompt, states in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            expected = judge(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(states, expected.numpy(), atol=1e-4)
