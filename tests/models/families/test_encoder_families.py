"""Every family of encoders, and decoders that see both ways, on prompts of mixed lengths; transformers is the judge."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel, T5EncoderModel

from app.checkpoints.model_info import ASSETS
from app.errors import CheckpointError, UnsupportedError
from tests.hf_logprobs import prompts
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 61, 100, 8, 33))
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "vocab_size": 512,
    "max_position_embeddings": 130,
}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
T5 = {"d_model": 48, "d_ff": 80, "num_layers": 2, "num_heads": 4, "vocab_size": 512, "initializer_factor": 2.0}
BUCKETS = {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p"}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("albert", {"embedding_size": 24, "num_hidden_layers": 3}),
    "albert-groups": ("albert", {"embedding_size": 24, "num_hidden_layers": 4, "num_hidden_groups": 2}),
    "camembert": ("camembert", {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("distilbert", {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80}),
    "mpnet": ("mpnet", {"pad_token_id": 1}),
    "electra": ("electra", {}),
    "electra-narrow": ("electra", {"embedding_size": 24}),
    "modernbert": ("modernbert", {**MARKS, "num_hidden_layers": 4, "local_attention": 8}),
    "modernbert-biases": (
        "modernbert",
        {**MARKS, "local_attention": 40, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "nomic": ("nomic_bert", {}),
    "jina3": ("jina_embeddings_v3", {}),
    "eurobert": ("eurobert", {**MARKS, "num_key_value_heads": 2, "mask_token_id": 3}),
    "embeddinggemma": (
        "gemma3_text",
        {
            "use_bidirectional_attention": True,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "layer_types": WINDOWS,
        },
    ),
    "deberta2": ("deberta-v2", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 2}),
    "deberta2-narrow": ("deberta-v2", {"embedding_size": 24}),
    "deberta3": ("deberta-v2", {"relative_attention": True, "position_biased_input": False, **BUCKETS}),
    "t5": ("t5", {**T5, "d_kv": 8, "feed_forward_proj": "relu"}),
    "t5-gated": ("t5", {**T5, "d_kv": 16, "feed_forward_proj": "gated-gelu"}),
}
CLASSIFIERS = {
    "albert": {},
    "camembert": {},
    "distilbert": {},
    "mpnet": {},
    "electra": {},
    "modernbert": {},
    "modernbert-mean": {"classifier_pooling": "mean", "classifier_bias": True},
    "eurobert": {},
    "eurobert-mean": {"classifier_pooling": "mean"},
    "eurobert-bos": {"classifier_pooling": "bos"},
    "deberta3": {},
}


@cache
def written(name: str, changes: str = "{}", *, classifies: bool = False) -> tuple[Path, PreTrainedModel]:
    """A random model of the variant's directory, and transformers' own of it."""
    family, own = VARIANTS[name] if name in VARIANTS else VARIANTS[name.partition("-")[0]]
    sizes = {} if family == "t5" else SIZES
    config = AutoConfig.for_model(family, **{**sizes, **own, **json.loads(changes)})
    make: Any = T5EncoderModel if family == "t5" else AutoModel.from_config
    kind: Any = T5EncoderModel if family == "t5" else AutoModel
    if classifies:
        make, kind = AutoModelForSequenceClassification.from_config, AutoModelForSequenceClassification
    torch.manual_seed(0)
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms would otherwise be all 0 or all 1, and hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.2)
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    model.save_pretrained(directory)
    return directory, kind.from_pretrained(directory, attn_implementation="eager").eval()


def agree(name: str, **options: Any) -> None:
    """Hidden states of all tokens, of prompts that share steps."""
    directory, judge = written(name)
    with PoolingDriver(
        directory, tokenizer=TOKENIZER, max_model_len=128, max_num_batched_tokens=140, **options
    ) as driver:
        found = driver.pool(PROMPTS, task="token_embed", use_activation=False)
        assert driver.num_steps < len(PROMPTS), "no two prompts shared a step"
    for prompt, result in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            expected = judge(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        assert expected.std() > 0.1
        np.testing.assert_allclose(result, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_of_prompts_that_share_steps(name: str) -> None:
    agree(name)


OVER_RANKS = ("mpnet", "deberta3", "t5", "embeddinggemma", "modernbert-biases", "nomic")  # the others: acceptance


@pytest.mark.parametrize(
    "name", [name if name in OVER_RANKS else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_over_two_ranks(name: str) -> None:
    agree(name, executor="local_processes", tensor_parallel_size=2)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes(name: str) -> None:
    directory, judge = written(name, json.dumps({**CLASSIFIERS[name], "num_labels": 3}), classifies=True)
    with PoolingDriver(directory, tokenizer=TOKENIZER) as driver:
        found = driver.pool(PROMPTS, task="classify", use_activation=False)
    with torch.inference_mode():
        expected = torch.cat([judge(input_ids=torch.tensor([prompt])).logits for prompt in PROMPTS])
    np.testing.assert_allclose(np.stack(found), expected.numpy(), atol=1e-4)
    assert np.ptp(expected.numpy(), axis=0).min() > 0.02, "the model says the same whatever it is asked"


def test_nomic_as_it_was_published() -> None:
    """config.json had GPT-2's names; the tensors' own names are those that transformers still writes."""
    directory, _ = written("nomic")
    (directory / "published").mkdir(exist_ok=True)
    for file in ("model.safetensors",):
        (directory / "published" / file).write_bytes((directory / file).read_bytes())
    config = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "n_embd": 48,
        "n_head": 4,
        "n_inner": 80,
        "n_layer": 2,
        "n_positions": 130,
        "prenorm": False,
        "rotary_emb_base": 1000,
        "rotary_scaling_factor": None,
        "type_vocab_size": 2,
        "vocab_size": 512,
    }
    (directory / "published" / "config.json").write_text(json.dumps(config))
    with (
        PoolingDriver(directory, tokenizer=TOKENIZER) as one,
        PoolingDriver(directory / "published", tokenizer=TOKENIZER) as other,
    ):
        np.testing.assert_array_equal(one.pool(PROMPTS), other.pool(PROMPTS))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("deberta3", {"conv_kernel_size": 3}, "conv_kernel_size"),
        ("deberta3", {"position_buckets": 1}, "position_buckets"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("t5", {"relative_attention_max_distance": 4}, "relative_attention_max_distance"),
        ("t5", {"feed_forward_proj": "gated-swish-ish"}, "hidden_act"),
    ],
)
def test_what_is_not_supported_is_named(name: str, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    directory, _ = written(name)
    given = json.loads((directory / "config.json").read_text())
    if "classifier_pooling" in changes:
        given["architectures"] = ["ModernBertForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps({**given, **changes}))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises((UnsupportedError, CheckpointError), match=named):
        PoolingDriver(tmp_path, tokenizer=TOKENIZER)
