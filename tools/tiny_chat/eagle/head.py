"""The head as it is trained: passes over the features of the pass before, and what the target says instead.

Parameters have the names of the published checkpoints (`app/models/drafters/eagle3.py` serves them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny_chat.model import MLP, Llama, RMSNorm, rope, rotate

READS = (3, 6)  # layers of the target whose inputs it reads; 6: what the last one gives
KNOWN = 832  # tokens that it may draft, those that the target says most often
UNROLLED = 7  # passes
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 1024,
    "draft_vocab_size": KNOWN,
    "hidden_size": 128,
    "target_hidden_size": 256,
    "intermediate_size": 288,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eagle_aux_hidden_state_layer_ids": list(READS),
    "dtype": "bfloat16",
}


class Layer(nn.Module):
    """Llama's, whose attention reads two vectors of a token."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        size, self.d = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(size, c["rms_norm_eps"]) for _ in range(3)
        )
        widths = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        self.self_attn = nn.ModuleDict(
            {f"{name}_proj": nn.Linear(2 * size, count * self.d, bias=False) for name, count in widths.items()}
        )
        self.self_attn["o_proj"] = nn.Linear(self.heads * self.d, size, bias=False)
        self.mlp = MLP(c)

    def joined(self, embedded: Tensor, features: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), -1)

    def projected(self, name: str, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, T, 2 C] -> [B, H, T, D], turned to positions."""
        y = self.self_attn[f"{name}_proj"](x).view(*x.shape[:2], -1, self.d).transpose(1, 2)
        y = y if turn is None else rotate(y, *turn).to(y.dtype)
        return y if y.shape[1] == self.heads else y.repeat_interleave(self.heads // self.kv_heads, 1)

    def kept(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.projected("k", x, turn), self.projected("v", x, None)

    def forward(
        self,
        x: Tensor,
        features: Tensor,
        turn: tuple[Tensor, Tensor],
        hidden: Tensor,
        keys: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """x [B, S, 2 C] and features [B, S, C] of S places -> their features. They attend to the first of `keys`, which
        are of all T positions, but for those that are `hidden` [B, 1, S, T], and to their own among the later ones."""
        q = self.projected("q", x, turn)
        scores = (q @ keys[0][0].mT).float().masked_fill(hidden, float("-inf"))
        own = [(q * k).sum(-1, keepdim=True).float() for k, _ in keys[1:]]
        weights = torch.softmax(torch.cat((scores, *own), -1) * self.d**-0.5, -1).to(q.dtype)
        width = scores.shape[-1]
        y = weights[..., :width] @ keys[0][1]
        for i, (_, v) in enumerate(keys[1:]):
            y = y + weights[..., width + i, None] * v
        features = features + self.self_attn["o_proj"](y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return features + self.mlp(self.post_attention_layernorm(features))


class Head(nn.Module):
    """The layer, what leads to it and what follows."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        size, vocab = c["hidden_size"], c["vocab_size"]
        self.embed_tokens = nn.Embedding(vocab, size)
        self.fc = nn.Linear(len(READS) * c["target_hidden_size"], size, bias=False)
        self.midlayer = Layer(c)
        self.norm = RMSNorm(size, c["rms_norm_eps"])
        self.lm_head = nn.Linear(size, c["draft_vocab_size"], bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                small = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5 * small)


@dataclass
class Lesson:
    """Conversations, as the target has read them."""

    ids: Tensor  # int64 [B, T]
    read: Tensor  # [B, T, len(READS) * C]
    logits: Tensor  # [B, T, V] of the target
    says: Tensor  # bool [B, T] where the target says the token that follows


@torch.no_grad()
def lesson(target: Llama, ids: Tensor, own: Tensor) -> Lesson:
    """Reads ids int64 [B, T], of which `own` (bool) are those that the target says."""
    c = target.config
    turn = rope(ids.shape[1], c["head_dim"], c["rope_theta"], ids.device)
    states = [target.model.embed_tokens(ids)]
    for layer in target.model.layers:
        states.append(layer(states[-1], *turn, None))
    read = torch.cat([states[layer] for layer in READS], -1)
    return Lesson(ids, read, target.logits(target.model.norm(states[-1])), F.pad(own[:, 1:], (0, 1)))


def unrolled(head: Head, ids: Tensor, read: Tensor, places: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pass by pass, what places int64 [B, S] of ids [B, T] tell of the second token behind them, then of the third and
    on, as the tokens in between are known: those places, further by one each time, and logits [B, S, draft V]."""
    length = ids.shape[1]
    cos, sin = rope(length + UNROLLED, CONFIG["head_dim"], CONFIG["rope_theta"], ids.device)
    padded = F.pad(ids, (0, UNROLLED + 1))
    layer, whole = head.midlayer, head.fc(read)
    x = layer.joined(head.embed_tokens(padded[:, 1 : 1 + length]), whole)
    keys = [layer.kept(x, (cos[:length], sin[:length]))]
    hidden = (torch.arange(length, device=ids.device) > places[..., None])[:, None]
    features, x = taken(whole, places), taken(x, places)
    for ahead in range(UNROLLED):
        at = places + ahead
        turn = cos[at][:, None], sin[at][:, None]
        if ahead:
            x = layer.joined(head.embed_tokens(padded.gather(1, at + 1)), features)
            keys.append(layer.kept(x, turn))
        features = layer(x, features, turn, hidden, keys)
        yield at, head.lm_head(head.norm(features)).float()


def passes(head: Head, known: Tensor, of: Lesson) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, which is the cross entropy of the target's distribution over the tokens that the head knows; of each
    place [B, S] and pass, whether the head's most likely token is the target's, and whether that says one there."""
    starts = F.pad(of.says[:, 1:], (0, 1))  # a guess from a place is of the second token behind it
    places = starts.float().topk(int(starts.sum(1).max())).indices.sort().values
    starts = starts.gather(1, places)
    said, best = F.pad(of.says, (0, UNROLLED + 1)), of.logits.argmax(-1)
    loss, right, told = torch.zeros((), device=best.device), [], []
    for ahead, (at, made) in enumerate(unrolled(head, of.ids, of.read, places)):
        behind = (at + 1).clamp(max=best.shape[1] - 1)
        valid = starts & said.gather(1, at + 1)
        wanted = torch.softmax(taken(of.logits, behind)[..., known].float(), -1)
        cross = -(wanted * torch.log_softmax(made, -1)).sum(-1)
        loss = loss + 0.9**ahead * (cross * valid).sum() / valid.sum().clamp(min=1)
        right.append((known[made.argmax(-1)] == best.gather(1, behind)) & valid)
        told.append(valid)
    return loss, torch.stack(right), torch.stack(told)


def taken(x: Tensor, places: Tensor) -> Tensor:
    """[B, T, C] -> [B, S, C]."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
