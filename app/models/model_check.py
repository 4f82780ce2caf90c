"""Checks what a model's JSON files can tell before anything is loaded: whether this is a model that we run, as
configured.

Every entry (the command line, `build`, a replica, `LLM`) comes through here, so each says the same line. No weight is
read and no torch is imported.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from app.backends import MODEL_CONFIGS
from app.checkpoints.fields.config_json import COMMON_FIELDS, FIELDS, check_config
from app.checkpoints.model_info import GENERATION_FILE, ModelInfo
from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError, UnsupportedError
from app.models import MODELS, POOLING_MODELS
from app.models.decoder_settings import DecoderSettings
from app.models.generation_json import check_generation
from app.models.implementation import runs_natively, transformers_refusal
from app.records.parallel_plan import check_backend_sizes, check_parallel_sizes
from app.records.pooling_info import pooling_info
from app.records.step_budget import step_budget
from app.registry import Registry

NUM_NEAREST = 3  # names of architectures that are told beside an unknown one
_KINDS = re.compile("(For(Sequence|Masked|Causal|Reward|Process).*|Model)$")


def check_model(config: EngineConfig) -> ModelInfo:
    """The description of the model that `config` names, which fits the rest of `config`.

    CheckpointError names an unusable file, UnsupportedError what we do not run, ConfigError the option at fault.
    """
    info = ModelInfo.of(config)
    is_ours = info.impl != "transformers" and (info.architecture in MODELS or info.architecture in POOLING_MODELS)
    check_config(info.hf_config, f"{info.directory}/config.json", FIELDS if is_ours else COMMON_FIELDS)
    pools = info.runner(config.runner) == "pooling"
    if pools and config.logits_processors:
        raise ConfigError(
            "logits_processors: the model gives embeddings or scores, and has no logits", param="logits_processors"
        )
    _check_architecture(info, pools)
    most = _check_sizes(info)
    check_generation(info.generation_config, f"{info.directory}/{GENERATION_FILE}")
    _ = info.eos_token_ids  # an end of answers that is no token is an error, too
    if config.max_model_len is not None and config.max_model_len > most:
        why = "" if most != info.attention_chunk else ", one of the chunks in which it attends"
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the model's context of {most} tokens{why}: set "
            f"max_model_len to {most} or less",
            param="max_model_len",
        )
    if config.hf_overrides and not (pools or runs_natively(info)):
        raise ConfigError(
            "hf_overrides: transformers reads config.json by itself; change the file, or use model_impl=native",
            param="hf_overrides",
        )
    if pools or runs_natively(info):
        check_parallel_sizes(config, info)
    else:
        check_backend_sizes(config, info)
    pooling_info(config, info)
    step_budget(config, info, config.max_model_len or most)
    return info


def _check_architecture(info: ModelInfo, pools: bool) -> None:
    table: Registry[Any] = POOLING_MODELS if pools else MODELS
    if info.architecture in table and (pools or runs_natively(info)):
        _check_translation(info, table)
        return
    if info.impl != "transformers" and (withheld := table.withheld(info.architecture)):
        raise UnsupportedError(f"{info.directory}: {withheld}", param="model")
    if not pools and info.impl != "native":
        reason = transformers_refusal(info)
        if reason is None:
            return
        if info.impl == "transformers":
            raise UnsupportedError(
                f"{info.directory}: model_impl=transformers cannot run {info.architecture}: {reason}",
                param="model_impl",
            )
    nearest = difflib.get_close_matches(info.architecture, MODELS, NUM_NEAREST, cutoff=0.0)
    known = f"the nearest of {len(list(MODELS))} names: {', '.join(nearest)} (`manta models` lists all)"
    if pools:
        families = {_KINDS.sub("", name) for name in POOLING_MODELS}
        known = f"known: those of {', '.join(sorted(families))}"
    use = " of a model for embeddings and scores" if pools else ""
    why = "" if pools or info.impl == "native" else f" (through transformers: {reason})"
    raise UnsupportedError(
        f"{info.directory}: unknown architecture {info.architecture!r}{use}{why}; {known}", param="model"
    )


def _check_translation(info: ModelInfo, table: Registry[Any]) -> None:
    """A plugin may translate config.json for architectures of plugins, not for ours."""
    plugin = MODEL_CONFIGS.plugin(str(info.hf_config.get("model_type")))
    if plugin is not None and table.plugin(info.architecture) is None:
        raise UnsupportedError(
            f"{info.directory}: {plugin} changes config.json of model type {plugin.name!r}, but its architecture "
            f"{info.architecture} is Manta's own: uninstall it, or leave it out of MANTA_PLUGINS",
            param="model",
        )


def _check_sizes(info: ModelInfo) -> int:
    """The model's context, once it is known that config.json holds what every model needs."""
    file = info.directory / "config.json"
    try:
        sizes = [info.vocab_size, info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim]
        is_native = not info.is_causal or (info.architecture in MODELS and info.impl != "transformers")
        sizes += [info.hidden_size, *([info.intermediate_size] if is_native else [])]
        if min(*sizes, info.max_position_embeddings) < 1:
            raise ValueError("a size below 1")
        if info.is_causal and is_native:
            DecoderSettings.from_info(info)
    except KeyError as error:
        raise CheckpointError(f"{file} is not usable: it lacks {error.args[0]}", param="model") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{file} is not usable: {error}", param="model") from None
    return info.max_position_embeddings
