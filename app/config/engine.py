"""One engine's options: a model, its KV cache, its scheduler and the workers that run it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, field_validator, model_validator

from app.backends import (
    ATTENTION_BACKENDS,
    EXECUTORS,
    EXTRA_LOGITS_PROCESSORS,
    KV_CONNECTORS,
    LOAD_FORMATS,
    OWN_PROCESS,
    PLATFORMS,
    QUANT_METHODS,
    STEP_TRANSPORTS,
)
from app.config.frozen import Frozen
from app.config.speculative import SpeculativeConfig
from app.registry import OneOf


def _kv_cache_dtype(value: Any) -> Any:
    """Two spellings, one meaning."""
    return {"fp8_e4m3": "fp8", "int8": "int8_per_token_head"}.get(value, value) if isinstance(value, str) else value


def without_twins(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of plugins, none of which may run twice."""
    if twins := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twins)!r} is named twice")
    return names


MEANT_NULLS = frozenset({"speculative_config"})  # options that null turns off, and leaving them out may not


class EngineConfig(Frozen):
    """One engine: a model, its KV cache, its scheduler and the workers that run it."""

    model: str = Field(
        "tiny-chat",
        description="Model directory (Hugging Face layout), the name of a built-in model, or organisation/name of a "
        "model on a hub (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE), of which what is needed is downloaded; "
        "a well-known one also by family:size (qwen3:0.6b).",
    )
    tokenizer: str | None = Field(
        None, description="Tokenizer directory, or name on a hub; the model's own when not given."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a model that a hub is asked for; its main branch when not given."
    )
    download_dir: str | None = Field(
        None, description="Where models of a hub are kept; huggingface_hub's own cache (HF_HOME) when not given."
    )
    load_format: Annotated[str, OneOf(LOAD_FORMATS, ("auto",))] = Field(
        "auto",
        description="Where the weights come from. `safetensors`; `pt`: pytorch_model.bin, of which only tensors are "
        "read; `sharded_state`: each rank's own, as `manta save-sharded` wrote them; `gguf`: the file that `model` "
        "names; `dummy`: random numbers, no checkpoint is read. `auto`: the first of these that the directory holds, "
        "sharded_state before all.",
    )
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto", description="Whose modules: Manta's, or Hugging Face transformers'. `auto`: Manta's where it has them."
    )
    hf_overrides: dict[str, Any] = Field(
        {},
        max_length=64,
        description="Fields laid over the model's config.json, as {architectures: [Qwen3ForSequenceClassification]}; "
        "of an object, those that are named. Manta's own modules only.",
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        "auto",
        description="What the model is run for: to generate text, or for embeddings, scores and classes. `auto`: "
        "encoders, classifiers and what sentence-transformers packed are for pooling, language models generate.",
    )
    matryoshka: bool = Field(
        False, description="Let requests cut embeddings short (`dimensions`) although config.json does not offer it."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Compute type, and that of the KV cache unless kv_cache_dtype says otherwise. `auto`: float32 on a "
        "CPU, the checkpoint's type on a GPU.",
    )
    cpu_offload_gb: float = Field(0, ge=0, description="GiB of each GPU's weights to keep in host memory instead.")
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "int8_per_token_head"], BeforeValidator(_kv_cache_dtype)] = Field(
        "auto",
        description="`fp8`: keep keys and values in 8 bits (e4m3; also written fp8_e4m3), which halves the KV cache of "
        "a 16-bit model and the reading of it; arithmetic stays in 16 or 32 bits. With the checkpoint's k_scale and "
        "v_scale where it has them, else 1. On GPUs of compute capability 8.9 or later, and CPUs. "
        "`int8_per_token_head` (or int8): whole numbers, a scale for each token and head; on CPUs. `auto`: as dtype.",
    )
    recurrent_state_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type in which layers keep states of recurrences (Mamba, gated delta nets, lightning attention) "
        "between steps; arithmetic stays in 32 bits. 16 bits halve their memory and the reading of it, and round at "
        "every token. `auto`: what the checkpoint asks, else float32.",
    )
    quantization: Annotated[str, OneOf(QUANT_METHODS)] | None = Field(
        None,
        description="Quantize the linear layers while loading. `fp8`: weights per output channel, activations per "
        "token. `fp8_block`: in blocks of 128. `int8`: as fp8, in whole numbers. `w4`: weights alone, 4 bits in groups "
        "of 128. fp8 is for GPUs of compute capability 8.9 or later with dtype bfloat16, and CPUs. The other names are "
        "those of checkpoints that are quantized already, which need no option.",
    )
    device: Annotated[str, OneOf(PLATFORMS, ("auto",))] = Field("auto", description="`auto`: a visible GPU, else cpu.")
    seed: int = Field(0, description="Seed of dummy weights.")

    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt plus output, in tokens; the model's own context when not given."
    )
    block_size: int = Field(16, ge=1, description="Tokens per KV-cache block.")
    num_blocks: int | None = Field(
        None, ge=1, description="KV-cache blocks of all layers; worked out from the memory settings when not given."
    )
    kv_cache_memory_bytes: int = Field(1 << 30, ge=1, description="Most memory the KV cache takes on a CPU, in bytes.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory for weights, activations and KV cache together."
    )
    hybrid_kv_cache: Literal["auto", "off"] = Field(
        "auto", description="`auto`: layers with a sliding window keep its blocks only, where that saves memory."
    )
    enable_prefix_caching: bool = Field(
        True,
        description="Reuse the KV blocks of prompts that share a prefix. false: Llama, Mistral, Qwen 2 and Qwen 3 pool "
        "without a KV cache where a step holds the longest prompt and kv_cache_dtype and `deterministic` are not "
        "given; num_blocks, kv_cache_memory_bytes and attention_backend say nothing there.",
    )
    kv_host_memory_bytes: int = Field(
        0,
        ge=0,
        description="Host memory of each worker (pinned, on a GPU) for KV blocks that the device cache gave up: "
        "a prompt that finds them copies them back instead of computing them. 0: none.",
    )
    kv_connector: Annotated[str, OneOf(KV_CONNECTORS)] = Field(
        "host_memory", description="What keeps such blocks; host_memory gives up the least recently used ones first."
    )

    max_num_seqs: int = Field(128, ge=1, description="Most requests in one step; also the rows on the device.")
    max_num_batched_tokens: int = Field(
        2048,
        ge=1,
        description="Most tokens in one step; longer prompts are chunked. Of an encoder, or a model that pools without "
        "a KV cache (enable_prefix_caching), where it is not given, at least as many as its context, and on a GPU "
        "8192.",
    )
    max_step_s: float | None = Field(
        None,
        ge=0,
        description="Time that a step with prompts shall take, in seconds: it gets fewer of their tokens (128 or "
        "more) where those have taken longer, so that who decodes or comes meanwhile waits less; where 128 take "
        "longer, one or two steps of decodes alone follow. On a GPU it takes longer while more prompts wait than ten "
        "such steps compute, and where fewer tokens would be hardly quicker; else up to a quarter longer where a "
        "prompt ends with it, but on a GPU beside decodes for a hundredth of their tokens only. 0: no limit. When "
        "not given, 0.05 for a server on a CPU, 0.025 on a GPU.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="`priority`: lower `priority` first, then first come first served."
    )
    max_inflight_steps: int = Field(
        2,
        ge=1,
        le=32,
        description="Steps scheduled before the first one's tokens are back; 1 is synchronous stepping. When not "
        "given, 2, or pipeline_parallel_size + 1 where that is more: fewer would leave stages idle.",
    )

    speculative_config: SpeculativeConfig | None = Field(
        None,
        description="Speculative decoding, with the keys of vLLM: a `method` that proposes `num_speculative_tokens`, "
        "which are kept where they are right; `model`, the drafter's checkpoint. The tokens of an answer are the same "
        "with and without. When not given, `mtp` where the model's checkpoint holds a layer for it; null: none.",
    )

    language_model_only: bool = Field(
        False, description="Of a model that sees, load and serve the text part alone: it takes less memory."
    )
    encoder_cache_bytes: int = Field(
        1 << 30,
        ge=0,
        description="Memory of each worker for what the encoder made of pictures, so that those that come again are "
        "not encoded again. Of a model that sees.",
    )
    max_item_tokens: int = Field(
        16_384,
        ge=1,
        description="Most tokens that one picture or video may take; a larger one is refused. Memory for encoding one "
        "is kept on a GPU.",
    )

    enable_lora: bool = Field(False, description="Serve low-rank adapters (LoRA) of the model beside it.")
    max_loras: int = Field(4, ge=1, le=1024, description="Adapters that one step may compute with (enable_lora).")
    max_cpu_loras: int = Field(
        64, ge=1, le=1024, description="Adapters that may be loaded (enable_lora): each lies in host memory."
    )
    max_disk_loras: int = Field(
        0,
        ge=0,
        le=4096,
        description="Adapters beside max_cpu_loras that may have names (enable_lora): the ones that were asked for "
        "longest ago are read from their directories again when requests ask for them.",
    )
    lora_host_memory_bytes: int = Field(
        0, ge=0, description="Most memory of the host that a worker's loaded adapters take (enable_lora); 0: any."
    )
    max_lora_rank: int = Field(
        16, ge=1, le=512, description="Largest rank of an adapter (enable_lora); each of max_loras takes its memory."
    )

    lora_extras: bool = Field(
        False,
        description="Take adapters that have more than low-rank matrices of linear layers: DoRA, biases, embeddings, "
        "output head, a classifier's head (enable_lora). Takes memory of each slot, and time of steps with adapters.",
    )
    lora_experts: bool = Field(
        False,
        description="Take adapters of experts (enable_lora). Each slot takes memory for all experts, and steps with "
        "adapters take longer.",
    )
    lora_shared_experts: bool = Field(
        False,
        description="Take adapters of the experts that all tokens go through (enable_lora), which are computed apart "
        "from the others then, in all steps. lora_experts takes these, too.",
    )

    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share each layer.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Stages the layers are split into.")
    pipeline_partition: tuple[int, ...] | None = Field(
        None, description="Layers of each stage, first to last; split evenly when not given."
    )
    enable_expert_parallel: bool = Field(
        False,
        description="Each GPU of tensor_parallel_size holds whole experts, instead of a share of each one's width.",
    )
    enable_eplb: bool = Field(
        False, description="With enable_expert_parallel: move and copy experts so that GPUs are equally busy."
    )
    num_redundant_experts: int = Field(
        0, ge=0, description="Copies of experts in a layer (enable_eplb), rounded up to as many slots on each GPU."
    )
    eplb_window_size: int = Field(1000, ge=1, description="Steps whose tokens decide where experts go (enable_eplb).")
    eplb_step_interval: int = Field(3000, ge=1, description="Steps from one such decision to the next (enable_eplb).")
    small_all_reduce: Literal["auto", "nccl", "symmetric_memory", "fused"] = Field(
        "auto",
        description="How GPUs of one host sum up small messages: torch's symmetric-memory kernels or NCCL. `fused`: "
        "the former, and where a step has few rows the sum, the residual and the norm behind it are one kernel (16-bit "
        "models). `auto`: by a table that was measured on NVLink; NCCL without it, and where symmetric memory is not "
        "to be had. CPUs use gloo.",
    )
    executor: Annotated[str, OneOf(EXECUTORS)] = Field(
        "ray_workers",
        description="Where the workers run: in this process (one rank only), as child processes of it without Ray, or "
        "as actors of the placement group.",
    )
    step_transport: Annotated[str, OneOf(STEP_TRANSPORTS, ("auto",))] = Field(
        "auto",
        description="How steps reach ray_workers. `auto`: compiled_graph on GPUs of the replica's node, else socket.",
    )
    attention_backend: Annotated[str, OneOf(ATTENTION_BACKENDS, ("auto",))] = Field(
        "auto", description="`auto`: triton on GPUs, torch on CPUs."
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Replay decode steps, steps with prompts and steps of encoders from CUDA graphs. `auto`: on a GPU "
        "where attention_backend can be captured, going on without them should the capture fail (with "
        "tensor_parallel_size > 1 an error); `on`: an error where they cannot be had.",
    )
    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        min_length=1,
        description="Numbers of requests to capture a step for; a step runs at the next larger one, beyond the largest "
        "without a graph. When not given: 1, 2, 4, 8, 16, 24, ... up to max_num_seqs.",
    )
    cuda_graph_prompt_tokens: Literal["auto", "as_used"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="Most prompt tokens of steps with prompts that are replayed from CUDA graphs, which are captured "
        "while the engine idles. `auto`: up to 2,048, as far as a start finds that the GPU waits for the host in such "
        "steps (up to 1,024: or might, were the host busier), and not with latent attention; below 64: none. Not with "
        "several workers; steps that show pictures, verify drafts, or have adapters, run without. `as_used`, the "
        "default of `LLM` and for it (in a server all would wait): each when it comes for the third time, which its "
        "capture holds up by some tenths of a second; from then on bf16 results may differ by rounding. `LLM` captures "
        "what else is asked for at its start.",
    )
    whole_steps: Literal["auto", "off"] = Field(
        "auto",
        description="All layers of a decode step in one launch, on Hopper GPUs for models and weights that it serves, "
        "where that is quicker (results differ by rounding). `off`: layer by layer always, as where a fault is looked "
        "for, or other processes compute on the same GPU; so it is with gpus_per_worker below 1.",
    )
    cascade_attention: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Decodes read a prefix that they share once for all (Triton attention only; results differ by "
        "rounding). `auto`: not in float32, and in steps where that saves enough reading; `on`: in every step with two "
        "decodes or more.",
    )
    deterministic: Literal["off", "batch", "batch_and_layout"] = Field(
        "off",
        description="`batch`: logits are the same to the bit in bfloat16 and float32 whatever runs beside a request, "
        "cached or not, in chunks of any size, preempted, with drafts, on another replica of the same kind of machine. "
        "On CPUs and Hopper GPUs (bfloat16), for the models and options of docs/determinism.md; steps take longer. "
        "`batch_and_layout`: over 1, 2 or 4 tensor-parallel workers and any pipeline, too.",
    )
    logits_processors: tuple[Annotated[str, OneOf(EXTRA_LOGITS_PROCESSORS)], ...] = Field(
        (),
        description="Plugins that edit the logits of every step, in this order, before what requests ask for: what a "
        "grammar or allowed_token_ids rule out stays ruled out.",
    )
    limit_mm_per_prompt: dict[Literal["image", "video", "audio"], Annotated[int, Field(ge=0)]] = Field(
        {},
        description="Most pictures, videos or sounds of one prompt, as {image: 4, video: 1}; the ingress's "
        "media.max_images, max_videos or max_sounds where not given.",
    )
    mm_processor_kwargs: dict[str, StrictBool | int | float] = Field(
        {},
        max_length=64,
        description="Settings of the model's processors of pictures and videos in place of the checkpoint's own, as "
        "{max_pixels: 1003520, num_frames: 16}; which there are depends on its family.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each worker (CPU only). When not given: all cores for in_process; else all but "
        "one, which the ingress and the engine need, shared out among the workers.",
    )
    grammar_max_bytes: int = Field(256 << 10, ge=1, description="Longest grammar or schema of structured outputs.")
    grammar_max_depth: int = Field(96, ge=1, description="Most levels of nesting in a schema of structured outputs.")
    grammar_timeout_s: float = Field(
        0.5, gt=0, description="Time that compiling a grammar may take, in a process of its own; then it is refused."
    )
    grammar_memory_bytes: int = Field(
        256 << 20, ge=16 << 20, description="Memory that compiling a grammar may take, in a process of its own."
    )
    grammar_cache_size: int = Field(128, ge=1, description="Compiled grammars kept for further requests.")

    start_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Workers in processes of their own that take longer to load the model and get ready hang: the "
        "replica ends and is replaced.",
    )
    step_timeout_s: float = Field(
        300.0,
        gt=0,
        description="A step that takes longer means a hung worker: the replica exits and is replaced. Once steps "
        "have been measured, one far longer than they (10 x their 99th percentile, at least 5 s) means that too.",
    )

    @field_validator("logits_processors")
    @classmethod
    def _once_each(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return without_twins(names)

    @property
    def is_exact(self) -> bool:
        """True if logits must not depend on what else a step computes."""
        return self.deterministic != "off"

    @property
    def world_size(self) -> int:
        """Workers of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="before")
    @classmethod
    def _fill_the_pipeline(cls, values: Any) -> Any:
        """Steps in flight follow from the number of stages unless they are given."""
        if isinstance(values, dict) and "max_inflight_steps" not in values:
            stages = values.get("pipeline_parallel_size", 1)
            if isinstance(stages, int) and stages > 1:
                values = {**values, "max_inflight_steps": stages + 1}
        return values

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.kv_host_memory_bytes and not self.enable_prefix_caching:
            raise ValueError("kv_host_memory_bytes keeps cached prefixes, but enable_prefix_caching is off")
        drafter = self.speculative_config
        draft_size = None if drafter is None else drafter.draft_tensor_parallel_size
        if draft_size not in (None, 1, self.tensor_parallel_size):
            raise ValueError(
                f"speculative_config: draft_tensor_parallel_size={draft_size}: 1, or tensor_parallel_size="
                f"{self.tensor_parallel_size}"
            )
        if self.lora_experts and self.enable_eplb:
            raise ValueError("lora_experts: adapters of experts that move (enable_eplb) are not supported")
        for name in ("lora_extras", "lora_experts", "lora_shared_experts"):
            if getattr(self, name) and not self.enable_lora:
                raise ValueError(f"{name}: enable_lora is off")
        if self.executor in OWN_PROCESS and self.world_size > 1:
            raise ValueError(
                f"executor={self.executor} runs one worker, but tensor_parallel_size={self.tensor_parallel_size} x "
                f"pipeline_parallel_size={self.pipeline_parallel_size} need {self.world_size}: "
                "use local_processes or ray_workers"
            )
        if self.cuda_graph_prompt_tokens == "as_used" and self.world_size > 1:
            raise ValueError(
                f"cuda_graph_prompt_tokens=as_used: not with several workers (tensor_parallel_size="
                f"{self.tensor_parallel_size} x pipeline_parallel_size={self.pipeline_parallel_size}); use auto"
            )
        if self.pipeline_partition is not None and len(self.pipeline_partition) != self.pipeline_parallel_size:
            raise ValueError(
                f"pipeline_partition names {len(self.pipeline_partition)} stages, "
                f"pipeline_parallel_size={self.pipeline_parallel_size}"
            )
        return self
