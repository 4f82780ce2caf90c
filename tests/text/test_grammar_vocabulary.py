"""The tokenizer as the grammar library sees it: tokens of a text have exactly its bytes."""

from __future__ import annotations

import importlib

import pytest

from app.checkpoints.model_info import ModelInfo
from app.text.grammar_vocabulary import TokenizerVocabulary
from app.text.tokenizer import Tokenizer

MODEL = ModelInfo.from_directory("tiny-chat")
SOURCE = TokenizerVocabulary(MODEL.directory, MODEL.vocab_size, MODEL.eos_token_ids)


@pytest.mark.parametrize("text", ["One two", "", "<tool_call>{}", "<|im_end|> ä 漢", "\x00\t\n"])
def test_tokens_have_the_bytes_of_the_text(text: str) -> None:
    vocabulary = SOURCE.load()
    tokens = vocabulary.tokenize_bytes(text.encode())
    special = Tokenizer.from_directory(MODEL.directory).special_token_ids
    assert not set(tokens) & set(special), "the text of a special token is text"
    assert vocabulary.decode_bytes(tokens) == text.encode()


def test_another_process_makes_the_same_from_the_recipe() -> None:
    function, *arguments = SOURCE.recipe()
    module, _, name = function.partition(":")
    assert getattr(importlib.import_module(module), name)(*arguments) == SOURCE
