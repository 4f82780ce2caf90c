"""Reads how a model compares texts vector by vector (ColBERT: Khattab and Zaharia, 2020), and compares them. No torch
(I8).

Each token of a text has a vector, but for tokens that are left out; queries may be lengthened by tokens that only add
vectors. Read from the files of sentence-transformers, of PyLate, and of Stanford's ColBERT.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.checkpoints.fields.kinds import OBJECT, TEXT, check, either
from app.checkpoints.fields.late_json import (
    ARTIFACT_FIELDS,
    EXPANSION_FIELDS,
    LATE_FIELDS,
    MASK_FIELDS,
    PROCESSOR_FIELDS,
)
from app.checkpoints.json_file import read_object
from app.errors import UnsupportedError
from app.records.step import Float32Array

Role = Literal["query", "document"]
STANFORD = (
    "HF_ColBERT",
    "ColBERTJinaRobertaModel",
)  # the architecture in its config.json, and Jina's over its own code
_PACKED_AS = ("ColBERT", "MultiVectorEncoder")  # `model_type` of PyLate and of sentence-transformers
_PUNCTUATION = tuple(string.punctuation)
_USUAL_LENGTH = 32  # of an expanded query
_QUERY_ROWS = 1024  # vectors of a query that meet a document's at a time


@dataclass(slots=True, frozen=True)
class QueryExpansion:
    """Tokens behind a query that is shorter than `length`."""

    length: int
    token: str | None = None  # None: the tokenizer's mask, or the end of text
    is_seen: bool = False  # by the query's own tokens; else it sees them alone
    cuts: bool = True  # longer queries to `length`


@dataclass(slots=True, frozen=True)
class Pictured:
    """An architecture that compares texts with pictures of pages, and what its processor writes around each."""

    layer: str  # the tensors of the linear layer behind the tokens
    picture: str  # the prompt of a picture, or the part of it that the processor's file may write otherwise
    query: str  # before a query
    num_fillers: int = 0  # padding tokens behind it, which only add vectors
    query_end: str = ""
    before: str = ""  # the rest of that prompt
    behind: str = ""
    begin: str = ""  # of every text, in place of what the tokenizer puts there


PICTURED: Mapping[str, Pictured] = {
    "ColQwen2ForRetrieval": Pictured(
        "embedding_proj_layer",
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>",
        "Query: ",
        num_fillers=10,
        query_end="\n",
    ),
    "ColPaliForRetrieval": Pictured(
        "embedding_proj_layer",
        "Describe the image.",
        "Question: ",
        num_fillers=10,
        query_end="\n",
        before="<image><bos>",
        behind="\n",
        begin="<bos>",
    ),
}


@dataclass(slots=True, frozen=True)
class LateInteraction:
    """One model's rules of which vectors a text has."""

    query_length: int | None = None  # most tokens of one; None: the model's context
    document_length: int | None = None
    expansion: QueryExpansion | None = None
    skipped: tuple[str, ...] = ()  # tokens without a vector
    skips_in: tuple[str, ...] = ("document",)
    marks: tuple[tuple[Role, str], ...] = ()  # what begins each kind of text: a token where the vocabulary has it
    is_mean: bool = False  # scores are means over the query's vectors, not sums
    query_end: str = ""  # what stands behind a query, whole
    picture: str = ""  # the prompt in which a picture stands; "": it takes none
    is_bare: bool = False  # texts are read without what the tokenizer puts around them

    def limit(self, role: Role) -> int | None:
        """Most tokens of such a text; what exceeds them is cut off."""
        if role == "document":
            return self.document_length
        if self.expansion is not None and self.expansion.cuts:
            return self.expansion.length
        least = 0 if self.expansion is None else self.expansion.length
        return None if self.query_length is None else max(self.query_length, least)

    def mark(self, role: Role) -> str:
        """The text's beginning, which its prompt follows."""
        return dict(self.marks).get(role, "")

    def score(self, query: Float32Array, document: Float32Array) -> float:
        """MaxSim of [Q, E] and [D, E]: each vector of the query with the one of the document that is closest."""
        if not len(query) or not len(document):
            return 0.0
        rows = range(0, len(query), _QUERY_ROWS)
        total = sum(float((query[at : at + _QUERY_ROWS] @ document.T).max(axis=1).sum()) for at in rows)
        return total / len(query) if self.is_mean else total


@dataclass(slots=True, frozen=True)
class ExpandedQuery:
    """Says with a request how many of its tokens others see: those behind them see, and are not seen."""

    num_seen: int


def late_interaction(
    directory: Path, architecture: str, mask: Path | None, *, has_modules: bool
) -> LateInteraction | None:
    """The rules of a model directory, whose module of scoring masks is `mask`; None: the model compares whole texts."""
    if architecture in STANFORD and not has_modules:
        return _of_stanford(directory)
    if architecture in PICTURED:
        return _of_pictures(directory, PICTURED[architecture])
    packed = _read(directory / "config_sentence_transformers.json", LATE_FIELDS)
    if mask is None and packed.get("model_type") not in _PACKED_AS:
        return None
    encoder = {**_known(packed), **_known(_read(directory / "sentence_bert_config.json", LATE_FIELDS))}
    marks = {role: packed.get(f"{role}_prefix") for role in ("query", "document")}
    if mask is None:
        skipped, skips_in = packed.get("skiplist_words"), None
        skipped = _PUNCTUATION if skipped is None and packed.get("model_type") == "ColBERT" else skipped
    else:
        own = _read(mask / "config.json", MASK_FIELDS)
        if own.get("keep_only_token_ids"):
            raise UnsupportedError(f"{mask}: vectors of some tokens only (keep_only_token_ids)", param="model")
        skipped, skips_in = own.get("skiplist_words"), own.get("skiplist_tasks")
    skips_in = [skips_in] if isinstance(skips_in, str) else skips_in
    return LateInteraction(
        encoder.get("query_length"),
        encoder.get("document_length"),
        _expansion(directory, encoder, _known(packed)),
        tuple(skipped or ()),
        ("document",) if skips_in is None else tuple(skips_in),
        tuple((role, text) for role, text in marks.items() if text),  # type: ignore[misc]
        packed.get("similarity_fn_name") == "meanmaxsim",
    )


def _of_stanford(directory: Path) -> LateInteraction:
    found = _read(directory / "artifact.metadata", ARTIFACT_FIELDS)
    attends = found.get("attend_to_mask_tokens", False)
    return LateInteraction(
        document_length=found.get("doc_maxlen"),
        expansion=QueryExpansion(int(found.get("query_maxlen") or _USUAL_LENGTH), is_seen=attends),
        skipped=_PUNCTUATION if found.get("mask_punctuation", True) else (),
        marks=(
            ("query", f"{found.get('query_token_id') or '[unused0]'} "),
            ("document", f"{found.get('doc_token_id') or '[unused1]'} "),
        ),
    )


def _of_pictures(directory: Path, own: Pictured) -> LateInteraction:
    """transformers' processors: what they write may stand in a file of theirs."""
    written = _read(directory / "processor_config.json", PROCESSOR_FIELDS)
    tokens = _read(directory / "tokenizer_config.json", {"pad_token": either(TEXT, OBJECT)})
    padding = tokens.get("pad_token") or "<|endoftext|>"
    padding = padding if isinstance(padding, str) else str(padding.get("content") or "")
    picture = written.get("visual_prompt_prefix") or own.picture
    marks: list[tuple[Role, str]] = [("query", own.begin + (written.get("query_prefix") or own.query))]
    return LateInteraction(
        marks=(*marks, ("document", own.begin)) if own.begin else tuple(marks),
        query_end=padding * own.num_fillers + own.query_end,
        picture=f"{own.before}{picture}{own.behind}",
        is_bare=bool(own.begin),
    )


def stanford_size(directory: Path) -> int:
    """Width of the vectors of Stanford's checkpoints."""
    return int(_read(directory / "artifact.metadata", ARTIFACT_FIELDS).get("dim") or 128)


def _expansion(directory: Path, encoder: Mapping[str, Any], flat: Mapping[str, Any]) -> QueryExpansion | None:
    """Reads sentence-transformers' object, or the flat fields of PyLate, which lengthens queries unless they say
    otherwise."""
    if "query_expansion" in encoder:
        own = encoder["query_expansion"]
        if own is None:
            return None
        check(own, EXPANSION_FIELDS, str(directory), "query_expansion.")
        if own.get("length") is None or own.get("strategy") not in ("fixed", "min"):
            raise UnsupportedError(f"{directory}: query_expansion {own!r:.120} is not supported", param="model")
        return QueryExpansion(int(own["length"]), own.get("token"), bool(own.get("attend")), own["strategy"] == "fixed")
    if not flat.keys() & _FLAT or flat.get("do_query_expansion") is False:
        return None
    attends = flat.get("attend_to_expansion_tokens", flat.get("attend_to_mask_tokens", False))
    return QueryExpansion(int(flat.get("query_length") or _USUAL_LENGTH), is_seen=bool(attends))


_FLAT = {
    *("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens", "skiplist_words"),
    *("query_prefix", "document_prefix", "query_length", "document_length"),
}


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drops what is left out; an expansion that is null says that there is none."""
    return {name: value for name, value in fields.items() if value is not None or name == "query_expansion"}


def _read(file: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    given = read_object(file, optional=True)
    check(given, fields, str(file))
    return {name: given[name] for name in fields if name in given}
