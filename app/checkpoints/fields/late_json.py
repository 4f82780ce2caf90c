"""The files that say which vectors a text has where texts are compared vector by vector. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping

from app.checkpoints.fields.kinds import FLAG, OBJECT, TEXT, Kind, either, several, whole

_LENGTH = whole(1, 1 << 20)
_WORDS = several(TEXT, 1024)

# config_sentence_transformers.json and sentence_bert_config.json.
LATE_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("model_type", "similarity_fn_name", "query_prefix", "document_prefix"), TEXT),
    **dict.fromkeys(("query_length", "document_length"), _LENGTH),
    **dict.fromkeys(("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"), FLAG),
    "query_expansion": OBJECT,
    "skiplist_words": _WORDS,
}
EXPANSION_FIELDS: Mapping[str, Kind] = {"strategy": TEXT, "attend": FLAG, "token": TEXT, "length": _LENGTH}
MASK_FIELDS: Mapping[str, Kind] = {
    "skiplist_words": _WORDS,
    "skiplist_tasks": either(TEXT, several(TEXT, 8)),
    "keep_only_token_ids": several(whole(0, 1 << 30), 1024),
}
# artifact.metadata of Stanford's ColBERT.
ARTIFACT_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("query_token_id", "doc_token_id"), TEXT),
    **dict.fromkeys(("query_maxlen", "doc_maxlen", "dim"), _LENGTH),
    **dict.fromkeys(("mask_punctuation", "attend_to_mask_tokens"), FLAG),
}
# processor_config.json of transformers' ColPali and ColQwen2.
PROCESSOR_FIELDS: Mapping[str, Kind] = dict.fromkeys(("query_prefix", "visual_prompt_prefix"), TEXT)
