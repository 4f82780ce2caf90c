"""Recurrent layers in PyTorch as a CPU runs them: decodes side by side, prompts a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from app.kernels.recurrent import (
    CHUNK,
    DeltaGates,
    DeltaHeads,
    GatedNorm,
    RecurrentOps,
    ScanInputs,
    SpaceInputs,
    StateStep,
)
from app.kernels.recurrent.reference import (
    channel_gates,
    delta_gates,
    delta_parts,
    gated_norm,
    space_parts,
)

# (state [B, ...] before some tokens, tokens [B, L]) -> (what they give [B, L, ...], the state behind them)
Advance = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: StateStep,
    *,
    activate: bool,
) -> torch.Tensor:
    """The same as `reference.causal_conv`, all tokens at once, one of the W places after the other."""
    behind, row = weight.shape[1] - 1, step.row_of_token.long()
    before = _read(states, step.sources)
    tokens, starts = torch.arange(len(x), device=x.device), step.starts.long()
    total = torch.zeros(x.shape, device=x.device) if bias is None else bias.float().expand(x.shape).clone()
    for place in range(behind + 1):
        seen = _seen(x, before, row, tokens + (place - behind), starts[row])
        total += seen.float() * weight[:, place].float()
    rows = torch.arange(len(step.slots), device=x.device)
    last = [_seen(x, before, rows, step.ends.long() + (place - behind), starts[:-1]) for place in range(behind)]
    _write(states, step.slots, torch.stack(last, dim=1))
    return (F.silu(total) if activate else total).to(x.dtype)


def _seen(
    x: torch.Tensor, before: torch.Tensor, row: torch.Tensor, token: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """Numbers of these tokens; of those before a request's first one in the step, what its state holds."""
    behind = before.shape[1]
    kept = before[row, (token - start + behind).clamp(0, behind - 1)]
    return torch.where((token >= start)[:, None], x[token.clamp(min=0)].to(before.dtype), kept)


def gated_delta(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The same as `reference.gated_delta`: within a chunk the changes solve a triangular system (their WY form)."""
    query, key, value = delta_parts(mixed, heads)
    log_decay, rate = delta_gates(gates)

    def advance(state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (part[tokens].transpose(1, 2) for part in (query, key, value))  # [B, H, L, D]
        total, beta = (part[tokens].transpose(1, 2) for part in (log_decay.double(), rate))  # [B, H, L]
        total = total.cumsum(2)
        between = _between(total)
        decayed = total.exp().float()[..., None]
        system = (k * beta[..., None]) @ k.transpose(2, 3) * between
        right = torch.cat((v, k * decayed), dim=3) * beta[..., None]
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        new, read = torch.split(solved, [v.shape[3], k.shape[3]], dim=3)
        change = new - read @ state.transpose(2, 3)
        out = (q * decayed) @ state.transpose(2, 3) + (q @ k.transpose(2, 3) * between) @ change
        left = (total[..., -1:] - total).exp().float()[..., None]
        state = state * decayed[:, :, -1:] + change.transpose(2, 3) @ (k * left)
        return out.transpose(1, 2), state

    return gated_norm(_run(advance, states, step, value), norm)


def channel_delta(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The same as `reference.channel_delta`: as `gated_delta`, pairs of tokens summed channel by channel."""
    query, key, value = delta_parts(mixed, heads)
    log_decay, rate = channel_gates(gates, heads)

    def advance(state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, total = (part[tokens].transpose(1, 2) for part in (query, key, value, log_decay.double()))
        beta = rate[tokens].transpose(1, 2)[..., None]
        total = total.cumsum(2)  # [B, H, L, Dk]
        between = _between(total.transpose(2, 3)).permute(0, 1, 3, 4, 2)  # [B, H, L, L, Dk]
        decayed, left = total.exp().float(), (total[:, :, -1:] - total).exp().float()
        past = between * k[:, :, None]
        system = (k[:, :, :, None] * past).sum(-1) * beta
        right = torch.cat((v, k * decayed), dim=3) * beta
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        new, read = torch.split(solved, [v.shape[3], k.shape[3]], dim=3)
        change = new - read @ state.transpose(2, 3)
        out = (q * decayed) @ state.transpose(2, 3) + (q[:, :, :, None] * past).sum(-1) @ change
        state = state * decayed[:, :, -1:] + change.transpose(2, 3) @ (k * left)
        return out.transpose(1, 2), state

    return gated_norm(_run(advance, states, step, value, chunk=16), norm)


def state_space(inputs: SpaceInputs, states: torch.Tensor, step: StateStep) -> torch.Tensor:
    """The same as `reference.state_space`: within a chunk it is attention with a decay (their dual form)."""
    x, b, c, dt, log_decay = space_parts(inputs)

    def advance(state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u, k, q = (part[tokens].transpose(1, 2) for part in (x * dt[..., None], b, c))  # [B, H, L, P or N]
        total = log_decay.double()[tokens].transpose(1, 2).cumsum(2)
        out = (q * total.exp().float()[..., None]) @ state.transpose(2, 3)
        out = out + (q @ k.transpose(2, 3) * _between(total)) @ u
        left = (total[..., -1:] - total).exp().float()[..., None]
        state = state * total[..., -1].exp().float()[..., None, None] + u.transpose(2, 3) @ (k * left)
        return out.transpose(1, 2), state

    return (_run(advance, states, step, x) + x * inputs.d[:, None]).to(inputs.x.dtype)


def selective_scan(inputs: ScanInputs, states: torch.Tensor, step: StateStep) -> torch.Tensor:
    """The same as `reference.selective_scan`: requests side by side, token after token."""
    x, b, c = inputs.x.float(), inputs.b.float(), inputs.c.float()
    dt = F.softplus(inputs.dt.float() + inputs.dt_bias)
    decay = -inputs.a_log.exp()

    def advance(state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = []
        for t in tokens.unbind(1):
            state = state * (dt[t][..., None] * decay).exp() + (dt[t] * x[t])[..., None] * b[t][:, None]
            out.append((state @ c[t][..., None])[..., 0])
        return torch.stack(out, dim=1), state

    return (_run(advance, states, step, x) + x * inputs.d).to(inputs.x.dtype)


def _between(total: torch.Tensor) -> torch.Tensor:
    """The decay from each token (columns) up to each later one, itself included (rows): sums of logarithms, fp64
    [..., L] -> fp32 [..., L, L]; 0 above the diagonal."""
    difference = total[..., :, None] - total[..., None, :]
    above = torch.ones(difference.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    return difference.masked_fill(above, float("-inf")).exp().float()


def _run(
    advance: Advance, states: torch.Tensor, step: StateStep, like: torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """Take all states through their tokens; returns what these give, shaped as `like`."""
    out = torch.empty_like(like) if step.counts is None else torch.zeros_like(like)
    for rows, tokens in _parts(step):
        state = _read(states, step.sources[rows]).float()
        for part in torch.split(tokens, chunk, dim=1):
            given, state = advance(state, part)
            out[part.flatten()] = given.flatten(0, 1)
        _write(states, step.slots[rows], state)
    return out


def _parts(step: StateStep) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
    """Rows that bring equally many tokens, and these [B, L]: the short ones together, the others one by one."""
    starts, device = step.starts.tolist(), step.starts.device
    if step.counts is not None:
        for count in sorted(set(step.counts.tolist())):
            rows = (step.counts == count).nonzero()[:, 0]
            yield rows, step.starts[rows].long()[:, None] + torch.arange(count, device=device)
        return
    if step.num_short:
        tokens = torch.arange(step.num_short * step.short_len, device=device).view(step.num_short, -1)
        yield slice(0, step.num_short), tokens
    for row in range(step.num_short, len(step.slots)):
        if starts[row] < starts[row + 1]:  # of a static step, some have none
            yield slice(row, row + 1), torch.arange(starts[row], starts[row + 1], device=device)[None]


def _read(states: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """The states of these requests: zeros of those that begin."""
    found = states[sources.clamp(min=0).long()]
    return found.masked_fill_((sources < 0).view(-1, *[1] * (found.ndim - 1)), 0.0)


def _write(states: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    is_live = slots >= 0
    states[slots[is_live].long()] = values[is_live].to(states.dtype)


OPS = RecurrentOps(
    causal_conv=causal_conv,
    gated_delta=gated_delta,
    channel_delta=channel_delta,
    state_space=state_space,
    selective_scan=selective_scan,
    gated_norm=gated_norm,
)
