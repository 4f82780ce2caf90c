# ruff: noqa: C408, D103, PT018
"""Trains the byte-level BPE tokenizer on generated conversations and writes everything but the weights.

Three choices make letters and digits visible to a small model:

* every digit is a token of its own, and so is every newline and every blank that does not start a word;
* only words that follow a blank are merged (` planet`); a word at the start of a line, after a quote or after another
  mark is read letter by letter, which is what spelling, reversing and copying into JSON need;
* the words that frame turns and JSON schemas are the exception, so that a tool list stays short.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import families, template

ASSETS = Path(__file__).resolve().parents[2] / "app" / "assets"
VOCAB = 1024
FRAME = "assistant|system|user|tool"
KEYS = "type|function|name|description|parameters|properties|object|string|integer|number|boolean|required|arguments"
PATTERN = rf"(?:{FRAME})(?=\n)|(?:{KEYS})(?=\")| \p{{L}}+|\p{{L}}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s"

BIG = dict(
    hidden_size=256,
    intermediate_size=640,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
)
DRAFT = dict(
    hidden_size=128,
    intermediate_size=288,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


def config(sizes: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        **sizes,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def texts(n: int, seed: int):
    rng = random.Random(seed)
    for _ in range(n):
        msgs, tools, open_think = families.conversation(rng)
        yield "".join(t for t, _ in template.pieces(msgs, tools, open_think))


def train(n: int) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tr = trainers.BpeTrainer(
        vocab_size=VOCAB - len(template.MARKERS),
        special_tokens=template.SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(texts(n, 11), tr)
    tok.add_tokens([AddedToken(m, special=False, normalized=False) for m in template.MARKERS])
    assert tok.get_vocab_size() == VOCAB and tok.token_to_id("<|im_end|>") == 2
    return tok


def write(tok: Tokenizer) -> None:
    big, draft = ASSETS / "tiny-chat", ASSETS / "tiny-chat-draft"
    for d, sizes in ((big, BIG), (draft, DRAFT)):
        d.mkdir(parents=True, exist_ok=True)
        (d / "config.json").write_text(json.dumps(config(sizes), indent=2) + "\n")
        (d / "generation_config.json").write_text(
            json.dumps(
                {"do_sample": True, "temperature": 0.3, "top_p": 0.9, "eos_token_id": [2, 0], "pad_token_id": 0},
                indent=2,
            )
            + "\n"
        )
    tok.save(str(big / "tokenizer.json"), pretty=False)
    added = {
        str(tok.token_to_id(t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": t in template.SPECIAL,
        }
        for t in template.SPECIAL + template.MARKERS
    }
    (big / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "added_tokens_decoder": added,
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "unk_token": None,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 4096,
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": template.CHAT_TEMPLATE,
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    )
    (big / "chat_template.jinja").write_text(template.CHAT_TEMPLATE)
    (big / "special_tokens_map.json").write_text(
        json.dumps(
            {
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
            },
            indent=2,
        )
        + "\n"
    )


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--conversations", type=int, default=25000)
    args = ap.parse_args()
    tok = train(args.conversations)
    write(tok)
    n = c = 0
    for t in texts(300, 5):
        n, c = n + len(tok.encode(t).ids), c + len(t)
    print(f"vocab {tok.get_vocab_size()}, {c / n:.2f} characters a token")


if __name__ == "__main__":
    main()
