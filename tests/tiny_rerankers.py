"""Random tiny language models that judge pairs by yes and no, with tokenizers that know both words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from sentence_transformers import CrossEncoder
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from tests.tiny_encoders import TEXT
from tests.tiny_models import DEFAULTS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# What Qwen3-Reranker was trained on, as a template with roles for both texts.
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    '{{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default('
    '"Given a web search query, retrieve relevant passages that answer the query") }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>\n'
    '<|im_start|>assistant\n<think>\n\n</think>\n\n{{ "" }}'  # else the last newline would be the template's own
)


def written(directory: Path, *, tied: bool, template: str = "", seed: int = 0) -> Path:
    """A Qwen3ForCausalLM as Qwen3-Reranker was published."""
    directory.mkdir(parents=True, exist_ok=True)
    size = _write_tokenizer(directory)
    options = {
        **DEFAULTS,
        "vocab_size": size,
        "tie_word_embeddings": tied,
        **HEADS,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    _varied(Qwen3ForCausalLM(Qwen3Config(**options))).save_pretrained(directory)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def packed(source: Path, directory: Path, **options: Any) -> Path:
    """The same as sentence-transformers saves it."""
    CrossEncoder(str(source), device="cpu", **options).save_pretrained(str(directory))
    return directory


def converted(source: Path, directory: Path) -> Path:
    """A classifier of one class, whose weights are the difference of two rows of the head."""
    judge = Qwen3ForCausalLM.from_pretrained(source)
    config = Qwen3Config.from_pretrained(source, num_labels=1, pad_token_id=0)
    model = Qwen3ForSequenceClassification(config)
    model.model.load_state_dict(judge.model.state_dict())
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    rows = judge.lm_head.weight.data
    model.score.weight.data.copy_((rows[vocabulary["yes"]] - rows[vocabulary["no"]])[None])
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text((source / name).read_text())
    return directory


def _varied(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def _write_tokenizer(directory: Path) -> int:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT, '"yes" "no"'] * 4, trainer)
    backend.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "padding_side": "left"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return int(backend.get_vocab_size())
