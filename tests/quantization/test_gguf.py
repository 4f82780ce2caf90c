"""GGUF files of quantized tensors, each of another type, against transformers with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from app.checkpoints.gguf.description import describe
from app.errors import CheckpointError
from app.quantization.gguf import GgufMethod
from tests.checkpoints.gguf.test_description import expect_logits
from tests.gguf_models import write_gguf
from tests.loading.load_formats.formats import contexts, fill
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

# Rows of whole blocks of 256; of a rank's share, half a block.
SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 64, "num_hidden_layers": 2, "initializer_range": 0.05},
}
# As llama.cpp mixes them: other types in one fused layer, others in other layers.
MIXES = {
    "k": {"attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "*": "Q4_K"},
    "old": {"attn_v": "Q8_0", "ffn_gate": "Q5_1", "ffn_up": "Q4_1", "token_embd": "Q8_0", "*": "Q4_0"},
    "small": {"attn_q": "Q2_K", "attn_k": "Q2_K", "attn_v": "Q3_K", "ffn_down": "F16", "*": "Q3_K"},
    "tables": {"attn_output": "IQ4_NL", "ffn_down": "IQ4_XS", "ffn_up": "BF16", "*": "IQ4_XS"},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    describe.cache_clear()


def types(mix: str) -> Any:
    kinds = MIXES[mix]
    return lambda name: kinds.get(name.split(".")[-2], kinds["*"])


@pytest.mark.parametrize("mix", MIXES)
def test_logits_are_those_of_its_weights(mix: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    expect_logits(file, write_gguf(tiny_model("llama", **SIZES), file, "llama", types(mix)))


@pytest.mark.parametrize("mix", ["k", "tables"])
def test_each_rank_has_its_shares(mix: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    judge = write_gguf(tiny_model("llama", **SIZES), file, "llama", types(mix)).model.layers[1]
    for rank, ctx in enumerate(contexts(file, 2)):
        layer = fill(file, ctx=ctx).model.layers["1"]
        rows = [getattr(judge.self_attn, f"{part}_proj").weight.chunk(2)[rank] for part in "qkv"]
        stored = [weight.form().dequantize() for weight in layer.self_attn.qkv_proj.stored]
        torch.testing.assert_close(torch.cat(stored), torch.cat(rows).float(), rtol=1e-5, atol=1e-6)
        (down,) = layer.mlp.down_proj.stored
        columns = judge.mlp.down_proj.weight.chunk(2, 1)[rank]
        torch.testing.assert_close(down.form().dequantize(), columns.float(), rtol=1e-5, atol=1e-6)


def test_a_tied_table_is_dequantized(tmp_path: Path) -> None:
    file, source = tmp_path / "model.gguf", tiny_model("qwen2", **SIZES, tie_word_embeddings=True)
    expect_logits(file, write_gguf(source, file, "qwen2", lambda name: "Q6_K"))


def test_fused_tensors_are_split(tmp_path: Path) -> None:
    file, source = tmp_path / "model.gguf", tiny_model("phi3", **SIZES, pad_token_id=0, sliding_window=None)
    expect_logits(file, write_gguf(source, file, "phi3", lambda name: "Q5_K"))


def test_random_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", **SIZES), file, "llama", types("k"))
    driver = Driver(str(file), num_blocks=16, load_format="dummy")
    assert len(driver.run([Run([5, 9], greedy(3))])[0].tokens) == 3


def test_a_row_of_no_whole_blocks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", **{**SIZES, "intermediate_size": 288}), file, "llama", lambda name: "Q8_0")
    content = bytearray(file.read_bytes())
    at = content.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 16
    content[at] = int(gguf.GGMLQuantizationType.Q4_K)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ffn_down\.weight has shape \[256, 288\], no whole blocks of 256"):
        describe(file)


def test_a_scheme_of_another_hand_is_refused() -> None:
    with pytest.raises(CheckpointError, match="names no types; give the GGUF file itself"):
        GgufMethod.of_checkpoint({"quant_method": "gguf"})
