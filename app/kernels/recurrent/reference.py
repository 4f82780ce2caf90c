"""Recurrent layers, request by request and token by token: the truth."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from app.kernels.recurrent import DeltaGates, DeltaHeads, GatedNorm, RecurrentOps, ScanInputs, SpaceInputs, StateStep

UNIT_EPS = 1e-6  # of the norm of queries and keys


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: StateStep,
    *,
    activate: bool,
) -> torch.Tensor:
    """x [T, C] -> [T, C]."""
    out, width = torch.empty_like(x, memory_format=torch.contiguous_format), weight.shape[1]
    for tokens, before in _requests(states, step):
        seen = torch.cat((before.x, x[tokens].to(states.dtype).float()))
        for i in range(len(seen) - width + 1):
            total = (seen[i : i + width].float() * weight.float().t()).sum(0)
            total = total if bias is None else total + bias.float()
            out[tokens.start + i] = F.silu(total) if activate else total
        before.x = seen[len(seen) - width + 1 :]
    return out


def gated_delta(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """mixed [T, 2 Hk Dk + Hv Dv] -> [T, Hv * Dv]."""
    log_decay, rate = delta_gates(gates)
    return gated_norm(_delta(delta_parts(mixed, heads), log_decay[..., None], rate, states, step), norm)


def channel_delta(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """mixed [T, 3 H D] -> [T, H * D]."""
    log_decay, rate = channel_gates(gates, heads)
    return gated_norm(_delta(delta_parts(mixed, heads), log_decay, rate, states, step), norm)


def _delta(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Returns what states give, [T, Hv, Dv]; log_decay [T, Hv, 1 or Dk]."""
    query, key, value = parts
    out = torch.empty_like(value)
    for tokens, state in _requests(states, step):
        for t in range(tokens.start, tokens.stop):
            state.x = state.x * log_decay[t].exp()[:, None, :]
            change = (value[t] - torch.einsum("hvk,hk->hv", state.x, key[t])) * rate[t, :, None]
            state.x = state.x + torch.einsum("hv,hk->hvk", change, key[t])
            out[t] = torch.einsum("hvk,hk->hv", state.x, query[t])
    return out


def state_space(inputs: SpaceInputs, states: torch.Tensor, step: StateStep) -> torch.Tensor:
    """x [T, H, P] -> [T, H, P]."""
    x, b, c, dt, log_decay = space_parts(inputs)
    out = torch.empty_like(x)
    for tokens, state in _requests(states, step):
        for t in range(tokens.start, tokens.stop):
            state.x = state.x * log_decay[t].exp()[:, None, None]
            state.x = state.x + torch.einsum("hp,hn->hpn", x[t] * dt[t, :, None], b[t])
            out[t] = torch.einsum("hpn,hn->hp", state.x, c[t])
    return (out + x * inputs.d[:, None]).to(inputs.x.dtype)


def selective_scan(inputs: ScanInputs, states: torch.Tensor, step: StateStep) -> torch.Tensor:
    """x [T, D] -> [T, D]."""
    x, b, c = inputs.x.float(), inputs.b.float(), inputs.c.float()
    dt = F.softplus(inputs.dt.float() + inputs.dt_bias)
    decay = -inputs.a_log.exp()
    out = torch.empty_like(x)
    for tokens, state in _requests(states, step):
        for t in range(tokens.start, tokens.stop):
            state.x = state.x * (dt[t, :, None] * decay).exp() + (dt[t] * x[t])[:, None] * b[t]
            out[t] = state.x @ c[t]
    return (out + x * inputs.d).to(inputs.x.dtype)


def delta_parts(mixed: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, Hv, Dk], keys [T, Hv, Dk] and values [T, Hv, Dv] in fp32: the first two as they are multiplied."""
    parts = torch.split(mixed, list(heads.widths), dim=1)
    query, key = (part.view(len(part), heads.num_keys, heads.key_dim).float() for part in parts[:2])
    query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + UNIT_EPS) for part in (query, key))
    copies = heads.num_values // heads.num_keys
    query, key = (part.repeat_interleave(copies, dim=1) for part in (query * heads.key_dim**-0.5, key))
    return query, key, parts[2].view(len(mixed), heads.num_values, heads.value_dim).float()


def delta_gates(gates: DeltaGates) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the decay and the rate of each token, fp32 [T, Hv]."""
    rate = gates.b.float().sigmoid() * gates.rate_scale
    return -gates.a_log.exp() * F.softplus(gates.a.float() + gates.dt_bias), rate


def channel_gates(gates: DeltaGates, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of channels that decay by themselves: fp32 [T, H, Dk] and [T, H]."""
    dt = F.softplus(gates.a.float() + gates.dt_bias).view(len(gates.a), heads.num_values, heads.key_dim)
    return -gates.a_log.exp()[:, None] * dt, gates.b.float().sigmoid()


def gated_norm(x: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """x [T, G, D] -> [T, G * D] in the gate's type."""
    factor = gate_factor(norm.gate, sigmoid=norm.sigmoid).view(x.shape)
    y = x.float() if norm.norms_first else x.float() * factor
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float().view(-1, x.shape[2])
    return (y * factor if norm.norms_first else y).flatten(1).to(norm.gate.dtype)


def gate_factor(gate: torch.Tensor, *, sigmoid: bool) -> torch.Tensor:
    """Returns the factor that a gate is, fp32."""
    return gate.float().sigmoid() if sigmoid else F.silu(gate.float())


def space_parts(inputs: SpaceInputs) -> tuple[torch.Tensor, ...]:
    """x [T, H, P], b and c [T, H, N], dt and the logarithm of the decay [T, H], in fp32."""
    copies = inputs.x.shape[1] // inputs.b.shape[1]
    b, c = (part.float().repeat_interleave(copies, dim=1) for part in (inputs.b, inputs.c))
    dt = F.softplus(inputs.dt.float() + inputs.dt_bias).clamp(*inputs.dt_limit)
    return inputs.x.float(), b, c, dt, -inputs.a_log.exp() * dt


class _State:
    """A request's state while its tokens go by."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def _requests(states: torch.Tensor, step: StateStep) -> Iterator[tuple[slice, _State]]:
    """Each request's tokens and its state, which is written back behind them."""
    starts, ends = step.starts.tolist(), step.ends.tolist()
    for row, (source, slot) in enumerate(zip(step.sources.tolist(), step.slots.tolist(), strict=True)):
        state = _State((torch.zeros_like(states[0]) if source < 0 else states[source]).float().clone())
        yield slice(starts[row], ends[row]), state
        if slot >= 0:
            states[slot] = state.x


OPS = RecurrentOps(
    causal_conv=causal_conv,
    gated_delta=gated_delta,
    channel_delta=channel_delta,
    state_space=state_space,
    selective_scan=selective_scan,
    gated_norm=gated_norm,
)
