"""Test only. The four kernels of a Mamba-2 layer in plain torch, under SGLang's signatures.

Shapes: T tokens, H heads, P a head's width, N the state's width, G groups, S sequences.
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: object, activation: str | None = "silu",
    conv_states: Tensor | None = None, has_initial_state: Tensor | None = None,
    cache_indices: Tensor | None = None, query_start_loc: Tensor, **__: object,
) -> Tensor:  # fmt: skip
    """Sequences one after another in `x` of [channels, T]; the last columns are kept for decoding."""
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    ends = query_start_loc.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            continue
        slot = int(cache_indices[i]) if cache_indices is not None else i
        before = torch.zeros(x.shape[0], kept)
        if has_initial_state is not None and bool(has_initial_state[i]) and conv_states is not None:
            before = conv_states[slot][:, :kept].float()
        seen = torch.cat([before, x[:, begin:end].float()], 1)
        out[:, begin:end] = _activated(_conv(seen, weight, bias), activation).to(x.dtype)
        if conv_states is not None:
            conv_states[slot][:, :kept] = seen[:, -kept:].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, *_: object, conv_state_indices: Tensor | None = None, **__: object,
) -> Tensor:  # fmt: skip
    """One token a sequence."""
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    for i in range(x.shape[0]):
        slot = int(conv_state_indices[i]) if conv_state_indices is not None else i
        if slot < 0:
            continue
        seen = torch.cat([conv_state[slot][:, :kept].float(), x[i].float().reshape(x.shape[1], -1)], 1)
        made = _activated(_conv(seen, weight, bias), activation)
        out[i] = made.reshape(x[i].shape).to(x.dtype)
        conv_state[slot][:, :kept] = seen[:, -kept:].to(conv_state.dtype)
    return out


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int | None = None, *,
    D: Tensor, dt_bias: Tensor, cu_seqlens: Tensor, initial_states: Tensor | None = None,
    out: Tensor, state_dtype: torch.dtype | None = None, **_: object,
) -> tuple[None, Tensor, None]:  # fmt: skip
    """x [1, T, H, P], dt [1, T, H], B and C [1, T, G, N]: fills `out`, gives the states [S, H, P, N]."""
    x, dt, to, heads = x[0], dt[0], out[0], x.shape[2]
    step = F.softplus(dt.float() + dt_bias.float())
    b, c = _by_head(B[0], heads), _by_head(C[0], heads)
    states, ends = [], cu_seqlens.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        state = torch.zeros(heads, x.shape[2], b.shape[2])
        if initial_states is not None:
            state = initial_states[i].float()
        for t in range(begin, end):
            state, y = _step(state, x[t].float(), step[t], A.float(), b[t], c[t], D.float())
            to[t] = y.to(to.dtype)
        states.append(state)
    made = torch.stack(states)
    return None, made.to(state_dtype or made.dtype), None


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *, dt_bias: Tensor,
    state_batch_indices: Tensor | None = None, out: Tensor, **_: object,
) -> None:  # fmt: skip
    """One token a sequence: x [S, H, P], dt and A spread over P and N."""
    heads = x.shape[1]
    for i in range(x.shape[0]):
        slot = int(state_batch_indices[i]) if state_batch_indices is not None else i
        if slot < 0:
            continue
        step = F.softplus(dt[i, :, 0].float() + dt_bias[:, 0].float())
        b, c = _by_head(B[i][None], heads)[0], _by_head(C[i][None], heads)[0]
        now, y = _step(
            state[slot].float(), x[i].float(), step, A[:, 0, 0].float(), b, c, D[:, 0].float()
        )  # fmt: skip
        state[slot] = now.to(state.dtype)
        out[i] = y.to(out.dtype)


def _conv(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    b = None if bias is None else bias.float()
    return F.conv1d(seen[None], weight.float()[:, None], b, groups=weight.shape[0])[0]


def _activated(y: Tensor, activation: str | bool | None) -> Tensor:
    return F.silu(y) if activation in ("silu", "swish", True) else y


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[1], 1)


def _step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """state [H, P, N], x [H, P], dt, A and D [H], B and C [H, N]."""
    state = state * torch.exp(dt * A)[:, None, None] + (dt[:, None] * x)[:, :, None] * B[:, None, :]
    return state, (state * C[:, None, :]).sum(-1) + D[:, None] * x
