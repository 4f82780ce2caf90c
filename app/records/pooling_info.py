"""Reads how a model directory says that its hidden states become results: no torch, no transformers (I8).

Read from the files of sentence-transformers (`modules.json`, `<n>_Pooling/config.json`, `<n>_Dense/config.json`)
where there are any, else from the architecture: an encoder's first token, a decoder's last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.checkpoints.encoder_types import NV_EMBED, VOYAGE
from app.checkpoints.fields.kinds import Kind, check, expect, whole
from app.checkpoints.fields.pooling_json import DENSE_FIELDS, MODULES, POOLING_FIELDS, PROMPT_FIELDS, SPLADE_FIELDS
from app.checkpoints.json_file import read_json, read_object
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError, InvalidRequestError, UnsupportedError
from app.records.classifier_info import Scores, classifier_pooling, labels_of, rewards, scores_of
from app.records.late_interaction import PICTURED, STANFORD, LateInteraction, late_interaction, stanford_size
from app.records.listwise import Listwise
from app.records.pooling_params import PoolingParams, PoolingTask
from app.records.task_prompts import NO_PROMPTS, TaskPrompts
from app.records.verdict import Verdict, configured_verdict, packed_verdict

Saturation = Literal["", "once", "twice"]
PairForm = Literal["", "jina_vl"]

# Pooling modes of sentence-transformers, under their old flags and their new names, and what we call them.
_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ONE = ("LABEL_0",)
TOKEN_HEADS = ("colbert_linear.pt", "sparse_linear.pt")
_MEANS = ("mean", "mean_sqrt_len")  # which may leave tokens out
_NEW_NAMES = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "SpladePooling", "MultiVectorMask", "LogitScore")
_ALONE = ("SpladePooling", "LogitScore")  # behind the transformer
_LLAMA_POOLINGS = {"avg": "mean", "cls": "cls", "last": "last"}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}
_SATURATIONS: dict[str, Saturation] = {"relu": "once", "log1p_relu": "twice"}


@dataclass(slots=True, frozen=True)
class DenseInfo:
    """A linear layer behind the pooling, with its activation; its weights lie in `directory`."""

    directory: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    name: str = "linear"  # of its tensors, but in a file of its own
    file: str = ""  # of the directory, with nothing else in it; "": they are among the directory's


@dataclass(slots=True, frozen=True)
class TokenHeadsInfo:
    """Two linear layers over tokens beside the text's vector (BGE-M3): a vector of each, and its weight."""

    vectors: DenseInfo
    weights: DenseInfo


@dataclass(slots=True, frozen=True)
class PoolingInfo:
    """One model's way from hidden states to results."""

    pooling: str  # a name of app/worker/pooling's table
    is_causal: bool  # attention looks back only, so that prompts may be computed in chunks
    tasks: tuple[PoolingTask, ...]
    denses: tuple[DenseInfo, ...] = ()
    skips_prompt: bool = False  # the tokens of the text before an input count for nothing in its vector
    normalize: bool = True  # embeddings get length 1 unless a request says otherwise
    embedding_size: int = 0
    matryoshka: tuple[int, ...] | None = None  # lengths an embedding may be cut to; () = any; None = none
    labels: tuple[str, ...] = ()  # a classifier's, in the order of its scores
    scores: Scores = "identity"  # what turns a classifier's logits into scores
    has_token_types: bool = False  # it tells the first text of a pair from the second
    prompts: TaskPrompts = NO_PROMPTS  # what stands before inputs
    # How often the logarithm is taken of what is above 0 in logits of the vocabulary, which vectors are made of then.
    saturates: Saturation = ""
    late: LateInteraction | None = None  # texts are compared vector by vector
    padding: tuple[int, int] | None = None  # a token, and to how many tokens texts are filled up with it
    token_heads: TokenHeadsInfo | None = None  # it gives vectors and weights of tokens, too
    verdict: Verdict | None = None  # its one score is what a language head says of tokens
    pairs: PairForm = ""  # a reranker's own, where the checkpoint's template is for conversations alone
    listwise: Listwise | None = None  # it reads a query with many documents, and gives vectors of marks alone

    @classmethod
    def of(cls, info: ModelInfo, matryoshka: bool = False) -> PoolingInfo:
        """Read it; `matryoshka` says that the operator vouches for cutting embeddings short.

        Raises CheckpointError for unreadable files, UnsupportedError for modules that we do not have.
        """
        hf = info.hf_config
        common: dict[str, Any] = {
            "is_causal": info.is_causal,
            "has_token_types": int(hf.get("type_vocab_size") or 0) > 1,
        }
        if info.architecture.endswith("RewardModel"):
            return cls("last", **rewards(info), **common)
        modules = _modules(info.directory)
        if verdict := _verdict(info, modules):
            scores = scores_of(hf, 1, info.directory)
            usual = _prompts(info.directory) if modules else NO_PROMPTS
            return cls(
                "last", tasks=("classify",), labels=_ONE, scores=scores, verdict=verdict, prompts=usual, **common
            )
        if info.architecture == "JinaVLForRanking":
            return cls("last", tasks=("classify",), labels=_ONE, scores="sigmoid", pairs="jina_vl", **common)
        if info.architecture.endswith("ForSequenceClassification"):
            labels = labels_of(hf)
            pooling = classifier_pooling(hf) if _usual_pooling(info) == "cls" else _usual_pooling(info)
            tasks: tuple[PoolingTask, ...] = ("classify", "token_classify") if info.is_causal else ("classify",)
            return cls(pooling, tasks=tasks, labels=labels, scores=scores_of(hf, len(labels)), **common)
        if (listwise := Listwise.of(info)) is not None:
            return _of_marks(info, listwise, common)
        if hf.get("model_type") in ("clip", "siglip"):
            return _of_towers(info, common)
        if sparse := [path for kind, path in modules if kind == "SpladePooling"]:
            common |= {"embedding_size": info.vocab_size, "prompts": _prompts(info.directory)}
            return cls(tasks=("embed",), normalize=False, **_splade(sparse[0]), **common)
        masks = [path for kind, path in modules if kind == "MultiVectorMask"]
        mask = masks[0] if masks else None
        if late := late_interaction(info.directory, info.architecture, mask, has_modules=bool(modules)):
            return _of_tokens(info, modules, late, common)
        denses = _published_denses(info) or tuple(_dense(path) for kind, path in modules if kind == "Dense")
        poolings = [_pooling(path) for kind, path in modules if kind == "Pooling"]
        skips = [_skips_prompt(path) for kind, path in modules if kind == "Pooling"]
        size = denses[-1].out_features if denses else info.hidden_size
        by_itself = "mean" if hf.get("emb_pooler") == "mean" else _usual_pooling(info)  # Jina's name for it
        pooling = poolings[0] if poolings else by_itself
        heads = _token_heads(info) if pooling == "cls" and not denses and not info.is_causal else None
        return cls(
            pooling,
            tasks=("embed", "token_embed") if heads is None else ("embed", "token_embed", "token_classify", "all"),
            token_heads=heads,
            skips_prompt=any(skips),
            denses=denses,
            normalize=any(kind == "Normalize" for kind, _ in modules) if modules else hf.get("model_type") != "dpr",
            embedding_size=size,
            matryoshka=_matryoshka(hf, matryoshka),
            prompts=_prompts(info.directory) if modules else NO_PROMPTS,
            **common,
        )

    @property
    def raw_task(self) -> PoolingTask:
        """Names what is done where nobody says: classes where there are some (of tokens: rewards of steps), else
        vectors."""
        return self.tasks[0] if self.labels or self.saturates else "token_embed"

    @property
    def needs_all_tokens(self) -> bool:
        """True if a text's vector is made of all of its tokens: what a prefix cache holds would be missing."""
        return self.pooling != "last"

    def check(self, params: PoolingParams) -> None:
        """Refuse what this model cannot do; InvalidRequestError and UnsupportedError name the field."""
        if params.task not in self.tasks:
            raise UnsupportedError(
                f"this model does not support the task {params.task!r}; it can: {', '.join(self.tasks)}",
                param="task",
            )
        if params.num_skipped is not None and (params.task != "embed" or self.pooling not in _MEANS):
            raise UnsupportedError("tokens are left out of means of texts only", param="num_skipped")
        wanted = params.dimensions
        if wanted is None:
            return
        if self.matryoshka is None:
            raise UnsupportedError(
                "dimensions: this model was not trained for shorter embeddings (Matryoshka); where you know "
                "better, start it with matryoshka: true",
                param="dimensions",
            )
        if wanted > self.embedding_size:
            raise InvalidRequestError(
                f"dimensions: {wanted} is more than the {self.embedding_size} of this model",
                param="dimensions",
            )
        if self.matryoshka and wanted not in self.matryoshka:
            known = ", ".join(map(str, self.matryoshka))
            raise InvalidRequestError(
                f"dimensions: {wanted} is none of those that this model was trained for: {known}",
                param="dimensions",
            )


def pooling_info(config: EngineConfig, info: ModelInfo) -> PoolingInfo | None:
    """That of the model which `config` runs; None where it generates. ConfigError for options that do not fit."""
    if info.runner(config.runner) == "generate":
        return None
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: pooling models run in one stage",
            param="pipeline_parallel_size",
        )
    if config.speculative_config is not None:
        raise ConfigError(
            "speculative_config: a pooling model generates nothing that could be drafted: leave it out",
            param="speculative_config",
        )
    return PoolingInfo.of(info, config.matryoshka)


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """(class name, directory) of the sentence-transformers modules behind the transformer, in order."""
    file = directory / "modules.json"
    if not file.is_file():
        return []
    found = []
    modules = read_json(file)
    expect(modules, MODULES, str(file))
    for entry in modules:
        kind = str(entry["type"]).rpartition(".")[2]
        kind = "Transformer" if kind == "MLMTransformer" else kind
        if kind not in _MODULES:
            raise UnsupportedError(f"{file}: modules of type {entry['type']!r} are not supported", param="model")
        found.append((kind, directory / str(entry.get("path", ""))))
    order = [kind for kind, _ in found]
    last = order.index("Normalize") if "Normalize" in order else len(order)
    is_odd = any(kind in order and order != ["Transformer", kind] for kind in _ALONE)
    if order[:1] != ["Transformer"] or "Dense" in order[last:] or is_odd:
        raise UnsupportedError(f"{file}: this order of modules is not supported: {', '.join(order)}", param="model")
    return found[1:]


def _verdict(info: ModelInfo, modules: list[tuple[str, Path]]) -> Verdict | None:
    """UnsupportedError where the model is no language model's."""
    packed = [path for kind, path in modules if kind == "LogitScore"]
    found = packed_verdict(packed[0], info) if packed else configured_verdict(info)
    if found is not None and not info.is_causal:
        raise UnsupportedError(f"scores by tokens' logits of {info.architecture}", param="model")
    return found


def _pooling(directory: Path) -> str:
    config = _read(directory, POOLING_FIELDS)
    modes = config.get("pooling_mode") or [name for flag, name in _OLD_FLAGS.items() if config.get(flag)]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1:
        raise UnsupportedError(f"{directory}: exactly one pooling mode is supported, not {modes}", param="model")
    return _NEW_NAMES.get(modes[0], str(modes[0]))


def _skips_prompt(directory: Path) -> bool:
    """`include_prompt: false`. UnsupportedError but for means."""
    skips = _read(directory, POOLING_FIELDS).get("include_prompt") is False
    if skips and (pooling := _pooling(directory)) not in _MEANS:
        raise UnsupportedError(f"{directory}: include_prompt=false with the pooling {pooling!r:.80}", param="model")
    return skips


def _splade(directory: Path) -> dict[str, Any]:
    """The largest weight of each entry of the vocabulary over all tokens, or their sum."""
    config = _read(directory, SPLADE_FIELDS)
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in _SATURATIONS:
        raise UnsupportedError(f"{directory}: {strategy!r} of {activation!r} is not supported", param="model")
    return {"pooling": strategy, "saturates": _SATURATIONS[activation]}


def _of_tokens(
    info: ModelInfo, modules: list[tuple[str, Path]], late: LateInteraction, common: dict[str, Any]
) -> PoolingInfo:
    """A vector of each token."""
    kinds = [kind for kind, _ in modules]
    if "Pooling" in kinds:
        raise UnsupportedError(f"{info.directory}: vectors of tokens behind a pooling", param="model")
    if info.is_causal and late.expansion is not None and not late.expansion.is_seen:
        raise UnsupportedError(
            f"{info.directory}: a query lengthened by tokens that it does not see, over a model that sees what came "
            "before only; set attend_to_expansion_tokens",
            param="model",
        )
    denses = tuple(_dense(path, "token_embeddings") for kind, path in modules if kind == "Dense")
    if info.architecture in STANFORD and not modules:  # whose layer lies with the encoder
        size = stanford_size(info.directory)
        denses = (DenseInfo(info.directory, info.hidden_size, size, bias=False, activation="identity"),)
    if (own := PICTURED.get(info.architecture)) is not None:
        size = info.hf_config.get("embedding_dim", 128)
        expect(size, whole(1, 1 << 16), f"{info.directory}/config.json: embedding_dim")
        denses = (DenseInfo(info.directory, info.hidden_size, size, bias=True, activation="identity", name=own.layer),)
    is_plain = "MultiVectorMask" in kinds and "Normalize" not in kinds
    prompts = _prompts(info.directory) if modules else NO_PROMPTS
    return PoolingInfo(
        "cls",
        tasks=("token_embed",),
        denses=denses,
        normalize=not is_plain,
        embedding_size=denses[-1].out_features if denses else info.hidden_size,
        prompts=prompts.of_documents(dict(late.marks)),
        late=late,
        **common,
    )


def _of_marks(info: ModelInfo, listwise: Listwise, common: dict[str, Any]) -> PoolingInfo:
    """Vectors of marks, through the two layers of Jina Reranker v3."""
    between, size = info.hidden_size // 2, 512
    first = DenseInfo(info.directory, info.hidden_size, between, bias=False, activation="relu", name="projector.0")
    second = DenseInfo(info.directory, between, size, bias=False, activation="identity", name="projector.2")
    return PoolingInfo(
        "last", tasks=("token_embed",), denses=(first, second), embedding_size=size, listwise=listwise, **common
    )


def _of_towers(info: ModelInfo, common: dict[str, Any]) -> PoolingInfo:
    """A vector of a text's last token, or of a picture; SigLIP was trained with texts of one length."""
    hf = info.hf_config
    size = hf.get("projection_dim", 512) if info.is_causal else hf.get("projection_size") or info.hidden_size
    padding = None if info.is_causal else (int(hf.get("pad_token_id") or 1), info.max_position_embeddings)
    expect(size, whole(1, 1 << 16), f"{info.directory}/config.json: projection_dim")
    return PoolingInfo("last", tasks=("embed",), embedding_size=int(size), padding=padding, **common)


def _token_heads(info: ModelInfo) -> TokenHeadsInfo | None:
    """The layers of BGE-M3, where their files lie beside the encoder's."""
    files = [info.directory / name for name in TOKEN_HEADS]
    if not all(file.is_file() for file in files):
        return None
    size = info.hidden_size
    vectors = DenseInfo(info.directory, size, size, bias=True, activation="identity", file=TOKEN_HEADS[0])
    weights = DenseInfo(info.directory, size, 1, bias=True, activation="relu", file=TOKEN_HEADS[1])
    return TokenHeadsInfo(vectors, weights)


def _dense(directory: Path, read: str = "sentence_embedding") -> DenseInfo:
    config = _read(directory, DENSE_FIELDS)
    given = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    others = [name for name in ("module_input_name", "module_output_name", "use_residual") if config.get(name)]
    odd = [name for name in others if config[name] != read]
    if given not in _ACTIVATIONS or odd:
        what = f"activation {given!r}" if given not in _ACTIVATIONS else f"{odd[0]}={config[odd[0]]!r}"
        raise UnsupportedError(f"{directory}: a dense module with {what} is not supported", param="model")
    if missing := [name for name in ("in_features", "out_features") if config.get(name) is None]:
        raise CheckpointError(f"{directory}/config.json is not usable: it lacks {missing[0]}", param="model")
    sizes = int(config["in_features"]), int(config["out_features"])
    return DenseInfo(directory, *sizes, bool(config.get("bias", True)), _ACTIVATIONS[given])


def _prompts(directory: Path) -> TaskPrompts:
    """Those of config_sentence_transformers.json. CheckpointError where the usual one is none of them."""
    file = directory / "config_sentence_transformers.json"
    given = read_object(file, optional=True)
    check(given, PROMPT_FIELDS, str(file))
    texts, default = dict(given.get("prompts") or {}), given.get("default_prompt_name")
    if default is not None and default not in texts:
        raise CheckpointError(f"{file} is not usable: default_prompt_name {default!r:.80} is no prompt", param="model")
    return TaskPrompts(tuple(texts.items()), default)


def _matryoshka(hf: dict[str, Any], vouched: bool) -> tuple[int, ...] | None:
    lengths = hf.get("matryoshka_dimensions")
    if lengths:
        return tuple(sorted(int(length) for length in lengths))
    return () if vouched or hf.get("is_matryoshka") else None


def _published_denses(info: ModelInfo) -> tuple[DenseInfo, ...]:
    """Layers that lie with the decoder in files that name them by no module: Voyage 4 nano's, as wide as it says that
    it has classes."""
    if info.architecture != VOYAGE:
        return ()
    size = len(info.hf_config.get("id2label") or {}) or int(info.hf_config.get("num_labels") or 0)
    if not size:
        what = "num_labels is missing, the width of its vectors: give it with hf_overrides"
        raise CheckpointError(f"{info.directory}/config.json is not usable: {what}", param="model")
    return (DenseInfo(info.directory, info.hidden_size, size, bias=False, activation="identity"),)


def _usual_pooling(info: ModelInfo) -> str:
    """A decoder's last token and an encoder's first, unless the architecture means the mean, or config.json says
    otherwise (`pooling` of a Llama that sees both ways)."""
    if info.architecture in (NV_EMBED, VOYAGE):
        return "mean"
    if info.hf_config.get("model_type") == "jina_embeddings_v5":
        return "last"
    if info.hf_config.get("model_type") != "llama_bidirec":
        return "last" if info.is_causal else "cls"
    given = str(info.hf_config.get("pooling") or "avg")
    if given not in _LLAMA_POOLINGS:
        raise UnsupportedError(f"pooling={given!r:.80} is not supported", param="model")
    return _LLAMA_POOLINGS[given]


def _read(directory: Path, fields: Mapping[str, Kind]) -> dict[str, Any]:
    """The config.json of a module."""
    file = directory / "config.json"
    config = read_object(file)
    check(config, fields, str(file))
    return config
