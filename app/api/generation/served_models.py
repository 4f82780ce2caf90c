"""Text tools and limits of each served model, for the ingress."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from app.backends import (
    ADAPTER_RESOLVERS,
    ATTENTION_BACKENDS,
    EXECUTORS,
    EXTRA_LOGITS_PROCESSORS,
    KV_CONNECTORS,
    LOAD_FORMATS,
    QUANT_METHODS,
    STAT_LOGGERS,
)
from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.checkpoints.model_info import ASSETS, ModelInfo, tokenizer_directory
from app.config.model import ModelConfig
from app.errors import ConfigError
from app.media.reader import MediaReader
from app.models.model_check import check_model
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS
from app.records.pooling_info import pooling_info
from app.registry import Registry
from app.text.chat_speech import ChatSpeech
from app.text.chat_template import ChatTemplate
from app.text.model_media import ModelMedia
from app.text.model_speech import ModelSpeech
from app.text.served_model import ServedModel
from app.text.template_sandbox import takes_too_much
from app.text.tokenizer import Tokenizer
from app.text.tokenizer_files import check_tokenizer


def check_served_model(config: ModelConfig) -> ModelInfo:
    """All that can be told without loading tokenizer or weights. CheckpointError names an unusable file,
    UnsupportedError what we do not run, ConfigError an option that does not fit.
    """
    info = check_model(config.engine)
    read_here = (TOOL_PARSERS, config.tool_parser), (REASONING_PARSERS, config.reasoning_parser)
    _import_plugins((*read_here, (ADAPTER_RESOLVERS, config.adapter_resolver)))
    check_tokenizer(tokenizer_directory(config.engine, info))
    for directory in config.served_adapters.values():
        AdapterFiles.read(directory, config.engine.max_lora_rank)
    if config.adapter_directory is not None and not Path(config.adapter_directory).is_dir():
        what = f"adapter_directory: no such directory {config.adapter_directory}"
        raise ConfigError(what, param="adapter_directory")
    if config.chat_template and not Path(config.chat_template).expanduser().is_file():
        raise ConfigError(
            f"chat_template: no such file {config.chat_template}; set --chat-template to a Jinja file",
            param="chat_template",
        )
    return info


def check_engine_plugins(config: ModelConfig) -> None:
    """Import the plugins that a model's replicas will. ConfigError says which package is broken."""
    engine = config.engine
    named: list[tuple[Registry[Any], str | None]] = [
        (QUANT_METHODS, engine.quantization),
        (ATTENTION_BACKENDS, engine.attention_backend),
        (LOAD_FORMATS, engine.load_format),
        (KV_CONNECTORS, engine.kv_connector),
        (EXECUTORS, engine.executor),
        *((EXTRA_LOGITS_PROCESSORS, name) for name in engine.logits_processors),
        *((STAT_LOGGERS, name) for name in config.stat_loggers),
    ]
    _import_plugins(named)


def _import_plugins(named: Iterable[tuple[Registry[Any], str | None]]) -> None:
    for table, name in named:
        if name is not None and table.plugin(name) is not None:
            table.load(name)


def load_served_model(config: ModelConfig, reader: MediaReader | None = None) -> ServedModel:
    """Read a model's tokenizer and template; takes up to a second. Errors are those of `check_served_model`. Without a
    `reader` it takes no pictures and no sounds."""
    info = check_served_model(config)
    directory = tokenizer_directory(config.engine, info)
    tokenizer = Tokenizer.from_directory(directory)
    trial = None if directory.is_relative_to(ASSETS) else takes_too_much
    template = ChatTemplate.from_directory(directory, tokenizer, config.chat_template, trial)
    media = None if reader is None else ModelMedia.of(info, tokenizer, reader, config.engine)
    return ServedModel(
        name=config.name,
        info=info,
        tokenizer=tokenizer,
        chat_template=template,
        max_model_len=min(config.engine.max_model_len or info.max_position_embeddings, info.max_position_embeddings),
        max_num_seqs=config.engine.max_num_seqs * config.min_replicas,
        num_replicas=config.min_replicas,
        aliases=config.aliases,
        created=int(time.time()),
        pooling=pooling_info(config.engine, info),
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        media=media,
        speech=None
        if reader is None
        else ModelSpeech.of(info, reader.sounds, tokenizer, config.engine.pipeline_parallel_size),
        chat_speech=ChatSpeech.of(info, media, template, tokenizer),
    )
