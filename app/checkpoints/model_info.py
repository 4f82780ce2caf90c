"""Reads what a model directory says about itself, from its JSON files: no torch, no transformers (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from app.checkpoints.adapters.task_adapter import task_adapter
from app.checkpoints.built_in import ASSETS as ASSETS
from app.checkpoints.built_in import BUILT_IN_MODELS, built_in_directory
from app.checkpoints.config_names import OTHER_NAMES, OWN_NAMES, overridden
from app.checkpoints.encoder_types import BOTH_WAYS, ENCODER_TYPES, WRITERS
from app.checkpoints.fields.kinds import check, expect, token_ids, whole
from app.checkpoints.gguf.description import describe
from app.checkpoints.hub import commit_of, fetch_description, fetch_weights, repository_of
from app.checkpoints.json_file import read_object
from app.checkpoints.known_models import sizes_hint
from app.checkpoints.older_scheme import older_scheme
from app.checkpoints.plain_config import plain_config
from app.checkpoints.transformers_catalog import size_names
from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError

GENERATION_FILE = "generation_config.json"
# What a model may say about its own sampling, as vLLM reads it.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Runner = Literal["generate", "pooling"]
# Types without attention, of which config.json says neither heads nor a context.
_WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba")
_ENDLESS = 131_072  # tokens: their context, which nothing but a row's memory bounds
# Models whose feed-forward layers are four times as wide as hidden states where config.json says nothing: by their type
# (of Nemotron's each layer tells its own width), and by fields that they have.
_WIDENED, _WIDENED_BY = ("bloom", "gpt_neo", "mpt", "nemotron-nas"), ("n_embd", "multi_query")
_GENERATING = (
    "InternVLChatModel",
    "OmniModel",
    "LMHeadModel",
    "ChatGLMModel",
    "MarianMTModel",
)  # language models whose names end like those of models without a head
_CACHES = {"longcat_flash": 2}  # of a layer; others have one
_CHUNKED = ("llama4", "llama4_text")


def resolve_model(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Directory of a model given by path, by the name of a built-in one or by that of a hub's, whose description (all
    but the weights) is downloaded; of a GGUF file, one that describes it. CheckpointError says why it is none."""
    path = built_in_directory(model) if model in BUILT_IN_MODELS else Path(model).expanduser()
    if not path.exists() and (repository := repository_of(model)) is not None:
        path = _described(model, repository, revision, download_dir)
    elif revision is not None:
        raise ConfigError(f"revision={revision}: model {model!r} is a directory, not of a hub", param="revision")
    if path.is_file() and path.suffix == ".gguf":
        return describe(path)
    if path.is_file():
        raise CheckpointError(
            f"model {model!r} is a file: give the directory that holds config.json, {str(path.parent)!r}", param="model"
        )
    if not path.is_dir():
        known = ", ".join(BUILT_IN_MODELS)
        raise CheckpointError(
            f"model {model!r}: no such path, nor a built-in model ({known}), nor organisation/name of a hub, nor a "
            f"well-known name such as qwen3:0.6b{sizes_hint(model)}",
            param="model",
        )
    if not (path / "config.json").is_file():
        files = [file.name for file in sorted(path.glob("*.gguf"))]
        remedy = f"; give one of its GGUF files: {', '.join(files[:5])}" if files else ""
        for inner in sorted(path.glob("0_*/config.json"))[:1]:  # as sentence-transformers packs CLIP
            remedy = f"; its model is {str(inner.parent)!r}"
        raise CheckpointError(
            f"model {model!r} is not a model directory: it holds no config.json (Hugging Face layout){remedy}",
            param="model",
        )
    return path


def _described(model: str, repository: str, revision: str | None, download_dir: str | None) -> Path:
    """The directory of a hub's model; an error names `model` too, as the user wrote it."""
    try:
        return fetch_description(repository, revision, download_dir)
    except CheckpointError as error:
        if repository == model:
            raise
        raise CheckpointError(f"{model} is {repository} of the hub; {error.message}", param=error.param) from None


@dataclass(frozen=True)
class ModelInfo:
    """`config.json` and `generation_config.json`, under names that do not change from family to family."""

    directory: Path
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    impl: Literal["auto", "native", "transformers"] = "auto"  # whose modules are to run it

    @classmethod
    def of(cls, config: EngineConfig) -> ModelInfo:
        """The description of a configuration's model; CheckpointError says why there is none."""
        info = cls.from_directory(config.model, config.revision, config.download_dir, config.hf_overrides)
        fields = info.hf_config
        if config.language_model_only:  # what sees is as if it were not there
            fields = {name: value for name, value in fields.items() if name not in ("vision_config", "audio_config")}
        if config.runner == "pooling":
            fields = _encoder_alone(fields)
        return replace(info, impl=config.model_impl, hf_config=fields)

    @classmethod
    def from_directory(
        cls,
        model: str,
        revision: str | None = None,
        download_dir: str | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> ModelInfo:
        """Read a model's description, with `overrides` laid over its config.json; CheckpointError names an unreadable
        file."""
        path = resolve_model(model, revision, download_dir)
        read = overridden(read_object(path / "config.json"), overrides)
        config = plain_config(read)
        if _architecture(config) not in WRITERS or (path / "modules.json").is_file():
            config = _encoder_alone(config)
        return cls(path, config, read_object(path / GENERATION_FILE, optional=True))

    @property
    def architecture(self) -> str:
        """Class name such as `LlamaForCausalLM`; the key into the table of models."""
        architectures = self.hf_config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise CheckpointError(f"{self.directory}/config.json names no architecture", param="model")
        return str(architectures[0])

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids are below it."""
        return int(self.hf_config["vocab_size"])

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states, C."""
        return int(self._size("hidden_size"))

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward layers; GPT-2 and its kin may leave it out and mean four times the hidden size."""
        if not self.attends:
            return int(self._find("intermediate_size") or int(self.hf_config.get("expand", 2)) * self.hidden_size)
        if str(self.hf_config.get("model_type")) in _WIDENED or not self.hf_config.keys().isdisjoint(_WIDENED_BY):
            return int(self._find("intermediate_size") or 4 * self.hidden_size)
        return int(self._size("intermediate_size"))

    @property
    def attends(self) -> bool:
        """True if a layer of it attends; others have no heads."""
        return str(self.hf_config.get("model_type")) not in _WITHOUT_ATTENTION

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has them; 0: the model has none."""
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        return int(next((self.hf_config[name] for name in names if self.hf_config.get(name) is not None), 0))

    @property
    def num_layers(self) -> int:
        """Decoder layers; Nemotron-H may tell them by a mark each, or by their kinds."""
        kinds = self.hf_config.get("hybrid_override_pattern") or self.hf_config.get("layers_block_type")
        if self._find("num_hidden_layers") is None and kinds is not None:
            return len(kinds)
        return int(self._size("num_hidden_layers"))

    @property
    def num_caches(self) -> int:
        """Attentions that keep keys and values, or latents, of all layers."""
        return self.num_layers * _CACHES.get(str(self.hf_config.get("model_type")), 1)

    @property
    def num_heads(self) -> int:
        """Query heads; 1 where nothing attends."""
        return int(self._size("num_attention_heads")) if self.attends else 1

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        if self.hf_config.get("multi_query") and not self.hf_config.get("new_decoder_architecture"):
            return 1  # Falcon, whatever the number says
        return int(self._find("num_key_value_heads") or self.num_heads)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        own = self.hf_config.get("head_dim", self.hf_config.get("d_kv")) if self.attends else None  # not Mamba 2's
        return int(own or self.hidden_size // self.num_heads)

    @property
    def max_position_embeddings(self) -> int:
        """Context length, in tokens: of an embedding model, what it was trained on; of RoBERTa, less its offset; of a
        model that attends in chunks, one of them."""
        default = 2048 if self.attends else _ENDLESS
        length = int(self._find("max_position_embeddings") or default) - self.position_offset
        if self.attention_chunk is not None:
            length = min(length, self.attention_chunk)
        if str(self.hf_config.get("model_type")) == "doge":  # further away, a choice of keys would count
            length = min(length, int(self.hf_config.get("keep_window_size", 2048)))
        file = self.directory / "sentence_bert_config.json"
        trained = read_object(file, optional=True)
        check(trained, {"max_seq_length": whole(0, 1 << 30)}, str(file))
        return min(length, int(trained.get("max_seq_length") or length))

    @property
    def attention_chunk(self) -> int | None:
        """Tokens within which layers of Llama 4 with rotated keys attend; None: they see all before them."""
        is_chunked = str(self.hf_config.get("model_type")) in _CHUNKED
        chunk = self.hf_config.get("attention_chunk_size", 8192) if is_chunked else None
        return None if chunk is None else int(chunk)

    @property
    def position_offset(self) -> int:
        """Row of the position embedding's table that belongs to the first token; RoBERTa keeps those before it."""
        kind = ENCODER_TYPES.get(str(self.hf_config.get("model_type")))
        if kind is None:
            return 0
        return int(self.hf_config.get("pad_token_id", 1)) + 1 if kind.position_offset is None else kind.position_offset

    @property
    def is_causal(self) -> bool:
        """True if a token sees only those before it; an encoder's see the whole text, and so do those of decoders
        that were trained for it."""
        hf = self.hf_config
        both_ways = hf.get("is_causal") is False or hf.get("use_bidirectional_attention") is True
        both_ways = both_ways or _architecture(hf) in BOTH_WAYS
        both_ways = both_ways or (hf.get("model_type") == "jina_embeddings_v5" and hf.get("is_decoder") is False)
        return not both_ways and (str(hf.get("model_type")) not in ENCODER_TYPES or _architecture(hf) in WRITERS)

    def runner(self, wanted: Literal["auto", "generate", "pooling"]) -> Runner:
        """Tells what the model is for. `auto`: language models generate, unless sentence-transformers packed them."""
        if wanted != "auto":
            if wanted == "generate" and not self.is_causal:
                raise ConfigError("runner=generate: an encoder generates no text; use auto or pooling", param="runner")
            return wanted
        if not self.is_causal or (self.directory / "modules.json").is_file():
            return "pooling"
        architecture = _architecture(self.hf_config)
        if architecture.endswith(_GENERATING):
            return "generate"
        pools = architecture.endswith(("Model", "ForRanking", "ForRetrieval", "ForSequenceClassification"))
        return "pooling" if pools else "generate"

    @property
    def dtype(self) -> str:
        """Type of the checkpoint's weights, such as `bfloat16`."""
        return str(self.hf_config.get("dtype") or self.hf_config.get("torch_dtype") or "float32")

    @property
    def state_dtype(self) -> str:
        """Type in which layers shall keep recurrent states."""
        names = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
        return str(next((found for name in names if (found := self.hf_config.get(name))), "float32"))

    @property
    def quantization_scheme(self) -> Mapping[str, Any]:
        """Returns what config.json says of quantized weights, or an older file beside it; empty: they are plain.
        CheckpointError where that is no object."""
        for name in ("quantization_config", "compression_config"):
            if scheme := self.hf_config.get(name):
                if not isinstance(scheme, Mapping):
                    what = f"{name} is {scheme!r:.80}, not an object"
                    raise CheckpointError(f"{self.directory}/config.json: {what}", param="model")
                return dict(scheme)
        return older_scheme(self._optional_json)

    def _optional_json(self, name: str) -> dict[str, Any]:
        return read_object(self.directory / name, optional=True)

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """The sampling parameters that the model's generation_config.json asks for."""
        own = self.generation_config
        return {name: own[name] for name in SAMPLING_DEFAULTS if own.get(name) is not None}

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer, from generation_config.json first. CheckpointError names the file where they
        are none of the vocabulary."""
        for file, fields in ((GENERATION_FILE, self.generation_config), ("config.json", self.hf_config)):
            if (eos := fields.get("eos_token_id")) is not None:
                expect(eos, token_ids(self.vocab_size), f"{self.directory}/{file} is not usable: eos_token_id")
                return tuple(dict.fromkeys(eos)) if isinstance(eos, list) else (eos,)
        return ()

    def _size(self, name: str) -> Any:
        """A number that must be there; KeyError says that it is not."""
        value = self._find(name)
        if value is None:
            raise KeyError(name)
        return value

    def _find(self, name: str) -> Any:
        """A number under the name that the family gives it; None: there is none."""
        own = OWN_NAMES.get(str(self.hf_config.get("model_type")), {}).get(name, name)
        values = (self.hf_config.get(one) for one in (own, *OTHER_NAMES[name]))
        found = next((value for value in values if value is not None), None)
        return self.hf_config.get(self._size_names.get(name, name)) if found is None else found

    @cached_property
    def _size_names(self) -> Mapping[str, str]:
        """Returns what families that have no file here call the sizes."""
        return size_names(str(self.hf_config.get("model_type")))


def _architecture(config: Mapping[str, Any]) -> str:
    """The class that config.json names first; "": none."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _encoder_alone(config: dict[str, Any]) -> dict[str, Any]:
    """The description of a model that reads and writes as that of its encoder; any other as it is."""
    if str(config.get("model_type")) not in ENCODER_TYPES:
        return config
    own = _architecture(config)
    named = {"architectures": [WRITERS[own]]} if own in WRITERS else {}
    return {name: value for name, value in config.items() if name != "num_decoder_layers"} | named


def fetch_model_weights(config: EngineConfig, info: ModelInfo) -> None:
    """Download the weights of a hub's model into the directory of `info`; nothing where the model is a directory."""
    repository = repository_of(config.model)
    if commit_of(info.directory) is not None and repository is not None:
        adapter = task_adapter(info.hf_config)
        beside = [] if adapter is None else [f"{adapter}/adapter_model.safetensors"]
        fetch_weights(repository, info.directory, config.download_dir, config.load_format, beside)


def tokenizer_directory(config: EngineConfig, info: ModelInfo) -> Path:
    """Returns where the tokenizer of a configuration's model is: a directory, a hub's model or the model's own."""
    if config.tokenizer is None:
        return info.directory
    if (repository := repository_of(config.tokenizer)) is not None:
        return fetch_description(repository, None, config.download_dir)
    return Path(config.tokenizer).expanduser()
