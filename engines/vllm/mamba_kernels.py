"""The Mamba-2 kernels in plain torch, for tiny models in tests: vLLM has them in Triton only."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def _activated(y: Tensor, activation: Any) -> Tensor:
    return F.silu(y) if activation in ("silu", "swish", True) else y


def _convolve(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Over channels by time, each channel by itself."""
    offset = None if bias is None else bias.float()
    return F.conv1d(seen[None], weight.float()[:, None], offset, groups=weight.shape[0])[0]


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, activation: Any = "silu",
    conv_states: Any = None, has_initial_state: Any = None, cache_indices: Any = None,
    query_start_loc: Any = None, **rest: Any,
) -> Tensor:  # fmt: skip
    """Of whole prompts one after another, channels by tokens; the last inputs are kept as states."""
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    bounds = query_start_loc.tolist()
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        slot = int(cache_indices[i]) if cache_indices is not None else i
        before = torch.zeros(x.shape[0], kept)
        if has_initial_state is not None and bool(has_initial_state[i]):
            before = conv_states[slot][:, :kept].float()
        seen = torch.cat([before, x[:, begin:end].float()], 1)
        out[:, begin:end] = _activated(_convolve(seen, weight, bias), activation).to(x.dtype)
        if conv_states is not None:
            conv_states[slot][:, :kept] = seen[:, -kept:].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None,
    *args: Any, conv_state_indices: Any = None, **rest: Any,
) -> Tensor:  # fmt: skip
    """Of one token of each request."""
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    slots = conv_state_indices.reshape(x.shape[0], -1)[:, 0].tolist()
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        seen = torch.cat([conv_state[slot][:, :kept].float(), x[i].float().reshape(x.shape[1], -1)], 1)
        y = _activated(_convolve(seen, weight, bias), activation)
        out[i] = y.reshape(x[i].shape).to(x.dtype)
        conv_state[slot][:, :kept] = seen[:, -kept:].to(conv_state.dtype)
    return out


def _step(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """State [heads, inner, state] and one token of it."""
    state = state * torch.exp(dt * a)[:, None, None] + (dt[:, None] * x)[:, :, None] * b[:, None, :]
    return state, (state * c[:, None, :]).sum(-1) + d[:, None] * x


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: Any = None, D: Any = None,
    z: Any = None, dt_bias: Any = None, cu_seqlens: Any = None, initial_states: Any = None, out: Any = None,
    state_dtype: Any = None, return_intermediate_states: bool = False, **rest: Any,
) -> Tensor:  # fmt: skip
    """Of whole prompts, token by token; gives the states at their ends."""
    if return_intermediate_states:
        raise NotImplementedError("states in the middle of a prompt")
    heads, bounds = x.shape[1], cu_seqlens.tolist()
    dt = F.softplus(dt.float() + dt_bias.float())
    b, c = (t.float().repeat_interleave(heads // B.shape[1], 1) for t in (B, C))
    ends = []
    for i, (begin, end) in enumerate(pairwise(bounds)):
        state = torch.zeros(heads, x.shape[2], B.shape[2])
        if initial_states is not None:
            state = initial_states[i].float()
        for t in range(begin, end):
            state, y = _step(state, x[t].float(), dt[t], A.float(), b[t], c[t], D.float())
            out[t] = y.to(out.dtype)
        ends.append(state)
    found = torch.stack(ends)
    return found.to(state_dtype or found.dtype)


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None,
    dt_bias: Any = None, *args: Any, state_batch_indices: Any = None, out: Any = None, **rest: Any,
) -> None:  # fmt: skip
    """Of one token of each request."""
    repeats = x.shape[1] // B.shape[1]
    for i, slot in enumerate(state_batch_indices.reshape(x.shape[0], -1)[:, 0].tolist()):
        if slot < 0:
            continue
        step = F.softplus(dt[i, :, 0].float() + dt_bias[:, 0].float())
        b, c = (t[i].float().repeat_interleave(repeats, 0) for t in (B, C))
        new, y = _step(state[slot].float(), x[i].float(), step, A[:, 0, 0].float(), b, c, D[:, 0].float())
        state[slot] = new.to(state.dtype)
        out[i] = y.to(out.dtype)
