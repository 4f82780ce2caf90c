"""Text tools and limits of each served model, for the ingress."""

from __future__ import annotations

import time

from app.api.engine_client import ServedModel
from app.api.parsers import check_parser_names
from app.config import ModelConfig
from app.engine.model_info import ModelInfo
from app.engine.pooling_info import pooling_info
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer


def load_served_model(config: ModelConfig) -> ServedModel:
    """Read a model's tokenizer and template; takes up to a second. CheckpointError names an unusable file,
    ConfigError a parser that does not exist.
    """
    check_parser_names(config.tool_parser, config.reasoning_parser)
    info = ModelInfo.from_directory(config.engine.model)
    directory = config.engine.tokenizer or info.directory
    tokenizer = Tokenizer.from_directory(directory)
    return ServedModel(
        name=config.name,
        info=info,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_directory(directory, tokenizer, config.chat_template),
        max_model_len=min(config.engine.max_model_len or info.max_position_embeddings, info.max_position_embeddings),
        aliases=config.aliases,
        created=int(time.time()),
        pooling=pooling_info(config.engine, info),
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )
