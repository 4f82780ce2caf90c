"""Random tiny encoders with tokenizers of their own, written by transformers, for tests of pooling."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.tiny_models import DEFAULTS, _root

TEXT = (
    "the a quick brown fox jumps over lazy dog river bank money loan water fish boat paris berlin rain sun "
    "engine serves many models on one graph und noch ein Wort café naïve Grüße 東京 12 345 , . ! ?"
)
WORDS = TEXT.split()
CONFIGS: dict[str, type[Any]] = {
    "bert": BertConfig,
    "roberta": RobertaConfig,
    "xlm-roberta": XLMRobertaConfig,
    "qwen3": Qwen3Config,
}
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "initializer_range": 0.3,
}


def texts(count: int, longest: int = 30, seed: int = 0) -> list[str]:
    """Distinct lines of 1 to `longest` words."""
    rng = random.Random(seed)
    return [f"{i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for i in range(count)]


@functools.cache
def tiny_encoder(family: str = "bert", num_labels: int = 0, seed: int = 0, changes: str = "{}") -> Path:
    """Directory of a random model; 0 labels: the encoder alone. `changes` is JSON over its configuration."""
    directory = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=_root()))
    size = _write_tokenizer(directory, family)
    options: dict[str, Any] = {**SIZES, "vocab_size": size, "max_position_embeddings": 130}
    if family == "bert":
        options |= {"pad_token_id": 0}
    elif family == "qwen3":
        options = {**DEFAULTS, "vocab_size": size, "pad_token_id": 1, "tie_word_embeddings": True}
    else:
        options |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    if num_labels:
        options["num_labels"] = num_labels
    config = CONFIGS[family](**{**options, **json.loads(changes)})
    torch.manual_seed(seed)
    model = (AutoModelForSequenceClassification if num_labels else AutoModel).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms would otherwise be all 0 or all 1 and hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return directory


def add_modules(directory: Path, pooling: dict[str, Any] | None = None, *, normalize: bool = True) -> None:
    """The files by which sentence-transformers would know the model, with plain means unless told otherwise."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    given = pooling or {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(given))


def hf_encoder(directory: Path, *, classifies: bool = False) -> PreTrainedModel:
    """The same weights in transformers."""
    kind = AutoModelForSequenceClassification if classifies else AutoModel
    model: PreTrainedModel = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def _write_tokenizer(directory: Path, family: str) -> int:
    """A word-piece tokenizer for BERT, byte-level BPE for the others; returns its size."""
    if family == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
        form = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
        marks = ("[CLS]", "[SEP]")
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        names = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>"}
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel()
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        form = ("$A </s>", "$A $B </s>") if family == "qwen3" else ("<s> $A </s>", "<s> $A </s> </s> $B </s>")
        marks = ("<s>", "</s>")
    backend.train_from_iterator([TEXT] * 4, trainer)
    tokens = [(token, backend.token_to_id(token)) for token in marks]
    backend.post_processor = processors.TemplateProcessing(single=form[0], pair=form[1], special_tokens=tokens)
    backend.save(str(directory / "tokenizer.json"))
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    if family == "bert":
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return int(backend.get_vocab_size())
