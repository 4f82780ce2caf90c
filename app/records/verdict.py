"""Scores of pairs by what a language model would say next: yes or no (Qwen3-Reranker). No torch (I8).

A directory says so as sentence-transformers packs it (`LogitScore`), or in config.json by the fields that vLLM reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.checkpoints.fields.kinds import check
from app.checkpoints.fields.pooling_json import VERDICT_FIELDS
from app.checkpoints.json_file import read_object
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, UnsupportedError

Asked = Literal["", "qwen3", "qwen3_vl"]
_DIFFERENCE, _PLAIN = "from_2_way_softmax", "no_post_processing"  # values of `method`


@dataclass(slots=True, frozen=True)
class Verdict:
    """The score is the logit of one token behind the prompt, less that of another where there is one."""

    yes: int
    no: int | None = None
    asked: Asked = ""  # pairs are put as this reranker was trained, where the checkpoint has no template for them


def packed_verdict(directory: Path, info: ModelInfo) -> Verdict:
    """That of a module `LogitScore`. CheckpointError where its tokens are none of the vocabulary."""
    file = directory / "config.json"
    config = read_object(file)
    check(config, VERDICT_FIELDS, str(file))
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if yes is None or max(int(yes), int(no or 0)) >= info.vocab_size:
        raise CheckpointError(f"{file} is not usable: true_token_id {yes}, false_token_id {no}", param="model")
    if config.get("module_input_name", "causal_logits") != "causal_logits":
        raise UnsupportedError(f"{file}: scores of {config['module_input_name']!r:.80}", param="model")
    return Verdict(int(yes), None if no is None else int(no), _asked(info.hf_config))


def configured_verdict(info: ModelInfo) -> Verdict | None:
    """That of `classifier_from_token`; None: config.json has none. UnsupportedError for a `method` that gives several
    scores."""
    hf = info.hf_config
    tokens = hf.get("classifier_from_token")
    if not tokens:
        return None
    method = hf.get("method", _DIFFERENCE if hf.get("is_original_qwen3_reranker") else _PLAIN)
    if len(tokens) != {_DIFFERENCE: 2, _PLAIN: 1}.get(str(method)):
        raise UnsupportedError(
            f"classifier_from_token of {len(tokens)} tokens with method={method!r:.80}: {_DIFFERENCE} of two and "
            f"{_PLAIN} of one are supported",
            param="model",
        )
    ids = [_token_id(info.directory, token, info.vocab_size) for token in tokens]  # the wrong one first
    return Verdict(ids[-1], ids[0] if len(ids) == 2 else None, _asked(hf))


def _asked(hf: Mapping[str, Any]) -> Asked:
    if not hf.get("is_original_qwen3_reranker"):
        return ""
    return "qwen3_vl" if str(hf.get("model_type")).startswith("qwen3_vl") else "qwen3"


def _token_id(directory: Path, token: str, vocab_size: int) -> int:
    file = directory / "tokenizer.json"
    model = read_object(file).get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    found = vocabulary.get(token) if isinstance(vocabulary, Mapping) else None
    if type(found) is not int or not 0 <= found < vocab_size:
        raise CheckpointError(f"classifier_from_token: {token!r:.80} is no token of {file}", param="model")
    return found
