"""Tiny random models that read a text and write an answer to it, with transformers as the judge."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from tests.tiny_models import _root

LENGTH = 48  # tokens that the encoder reads
_BART: dict[str, Any] = {
    **{"vocab_size": 331, "d_model": 64, "max_position_embeddings": LENGTH, "init_std": 1.0, "scale_embedding": True},
    **{"encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 112},
    **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
_T5: dict[str, Any] = {
    **{"vocab_size": 331, "d_model": 48, "d_kv": 16, "d_ff": 80, "num_heads": 4, "num_layers": 3},
    **{"num_decoder_layers": 2, "n_positions": LENGTH, "initializer_factor": 2.0, "decoder_start_token_id": 0},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
}
_GATED = {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_PADDED = {**_BART, "decoder_start_token_id": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", _BART),
    "mbart": ("mbart", _BART),
    "pegasus": ("pegasus", {**_PADDED, "scale_embedding": False}),
    "marian": ("marian", {**_PADDED, "activation_function": "swish"}),
    "m2m100": ("m2m_100", _BART),
    "t5": ("t5", _T5),
    "t5-gated": ("t5", _GATED),
    "mt5": ("mt5", _GATED),
}
START = {"bart": (2, 0), "mbart": (2, 0), "pegasus": (1,), "marian": (1,), "m2m100": (2, 7)}  # others: (0,)


def start_of(family: str) -> list[int]:
    """The decoder's prompt."""
    return list(START.get(family, (0,)))


@functools.cache
def tiny_text_model(family: str) -> Path:
    """The directory of a random model."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    model: Any = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in name or "relative_attention_bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
        model.get_input_embeddings().weight.mul_(0.02)  # or a tied head says the token that it read
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
        if kind in ("t5", "mt5") and settings.get("feed_forward_proj"):  # as published: the head is another table
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)
    if len(start_of(family)) > 1:
        model.generation_config.forced_bos_token_id = start_of(family)[1]
    if family == "marian":
        model.generation_config.bad_words_ids = [[1]]
    directory = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=_root()))
    model.save_pretrained(directory)
    return directory


@functools.cache
def text_judge(family: str) -> PreTrainedModel:
    """transformers' own."""
    found = AutoModelForSeq2SeqLM.from_pretrained(
        tiny_text_model(family), dtype=torch.float32, attn_implementation="eager"
    )
    model: PreTrainedModel = found.eval()
    return model


def judged_logits(family: str, text: list[int], answer: list[int]) -> torch.Tensor:
    """transformers' logits [T, V] behind each token of the decoder's."""
    with torch.inference_mode():
        judge: Any = text_judge(family)
        logits: torch.Tensor = judge(input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([answer])).logits[0]
    return logits


def judged_answer(family: str, text: list[int], count: int) -> list[int]:
    """What transformers' `generate` writes, greedily, behind the decoder's prompt."""
    judge: Any = text_judge(family)
    found = judge.generate(
        torch.tensor([text]), attention_mask=torch.ones(1, len(text), dtype=torch.long), do_sample=False, num_beams=1,
        max_new_tokens=count + len(start_of(family)) - 1, min_new_tokens=count + len(start_of(family)) - 1,
        forced_eos_token_id=None,
    )[0].tolist()  # fmt: skip
    assert found[: len(start_of(family))] == start_of(family)
    answer: list[int] = found[len(start_of(family)) :]
    return answer


def words(count: int, seed: int) -> list[int]:
    """A text of random tokens, none of them a mark."""
    rng = random.Random(seed)
    return [rng.randrange(8, 330) for _ in range(count)]
