# ruff: noqa: D103
"""What there is to learn from: conversations as lists of token ids, with which of them tiny-chat says."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from app.checkpoints.model_info import ASSETS
from tools.tiny_chat import families, template
from tools.tiny_chat.model import Llama, generate

TARGET = ASSETS / "tiny-chat"
LONGEST = 1536  # tokens of a conversation
STOP = 2  # the token that ends an answer
Spoken = tuple[np.ndarray, np.ndarray]  # token ids int16, and whether tiny-chat says them (bool)


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def made_up(seed: int, count: int = 512) -> list[Spoken]:
    """So many of the families' training conversations, short enough, which tiny-chat answers as they stand."""
    rng, tok, found = random.Random(seed), tokenizer(), []
    while len(found) < count:
        parts = template.pieces(*families.conversation(rng))
        encoded = tok.encode_batch([text for text, _ in parts], add_special_tokens=False)
        ids = [token for one in encoded for token in one.ids]
        own = [is_answer for one, (_, is_answer) in zip(encoded, parts, strict=True) for _ in one.ids]
        if len(ids) <= LONGEST:
            found.append((np.array(ids, np.int16), np.array(own)))
    return found


def conversations(first_seed: int, tokens: int, workers: int, seconds: float) -> Iterator[list[Spoken]]:
    """Parts of at least so many tokens, or of as many as the processes make up in time, but one."""
    begin, made = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for part in pool.imap_unordered(made_up, range(first_seed, first_seed + 100_000)):
            yield part
            made += sum(len(ids) for ids, _ in part)
            if made >= tokens or time.monotonic() - begin > seconds:
                pool.terminate()
                return


def continued(target: Llama, openings: list[list[int]], tokens: int, stop: int = -1) -> list[Spoken]:
    """What the target says behind openings, greedily: so many tokens, beyond the ends of its answers, or to `stop`."""
    budget = 1_200_000 if next(target.parameters()).is_cuda else 100_000
    found = []
    for opening, said in zip(openings, generate(target, openings, tokens, stop, budget), strict=True):
        ended = [stop] if stop >= 0 and len(said) < tokens else []
        ids = opening + said + ended
        found.append((np.array(ids, np.int16), np.arange(len(ids)) >= len(opening)))
    return found


def openings(spoken: list[Spoken], seed: int) -> list[list[int]]:
    """Of each conversation a beginning of any length, or its last question without the chat's form."""
    rng, tok, found = random.Random(seed), tokenizer(), []
    for number, (ids, _) in enumerate(spoken):
        cut = ids[: rng.randint(1, len(ids))][:256].tolist()
        if number % 2:
            asked = tok.decode(ids.tolist(), skip_special_tokens=False).split("<|im_start|>user\n")[-1]
            cut = tok.encode(asked.split("<|im_end|>")[0], add_special_tokens=False).ids[:256] or cut
        found.append(cut)
    return found


def held_out(target: Llama, per_family: int, tokens: int) -> list[Spoken]:
    """Questions of every family that no training conversation holds, with the target's own answers of so many tokens at
    most, and what it says beyond the ends of as many others."""
    tok, prompts = tokenizer(), []
    for family in families.EVAL_FAMILIES:
        rng = random.Random(f"eagle:{family}")
        for _ in range(per_family):
            one = families.heldout(family, rng)
            text = "".join(text for text, _ in template.pieces(one["messages"], one.get("tools")))
            text += "<|im_start|>assistant\n" + ("<think>\n" if one.get("chat_template_kwargs") else "")
            ids = tok.encode(text, add_special_tokens=False).ids
            if len(ids) <= LONGEST:
                prompts.append(ids)
    raw = openings([(np.array(ids, np.int16), np.ones(len(ids), bool)) for ids in prompts[:: max(1, per_family)]], 0)
    return continued(target, prompts, tokens, STOP) + continued(target, raw, tokens)


def batches(spoken: list[Spoken], tokens: int) -> list[list[Spoken]]:
    """Batches of about as long ones, each of so many tokens with its padding, of those where something is said."""
    ordered = sorted((one for one in spoken if one[1][2:].any()), key=lambda one: len(one[0]))
    found = []
    while ordered:
        count = max(1, tokens // len(ordered[-1][0]))
        found.append(ordered[-count:])
        del ordered[-count:]
    return found


def padded(rows: list[Spoken], device: torch.device) -> tuple[Tensor, Tensor]:
    """-> ids int64 and whether the target says them, bool, [B, T] each."""
    width = max(len(ids) for ids, _ in rows)
    tokens, own = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), bool)
    for i, (ids, says) in enumerate(rows):
        tokens[i, : len(ids)], own[i, : len(ids)] = ids, says
    return torch.from_numpy(tokens).to(device), torch.from_numpy(own).to(device)


def load_target(directory: Path, device: torch.device) -> Llama:
    """In fp32, as a CPU serves it."""
    from safetensors.torch import load_file

    target = Llama(json.loads((directory / "config.json").read_text())).requires_grad_(False)
    target.load_state_dict({name: t.float() for name, t in load_file(str(directory / "model.safetensors")).items()})
    return target.to(device)
