"""Which tensors an engine must be given in one call, because it fuses them as they come.

A loader that joins q_a_proj with kv_a_proj_with_mqa keeps the first until it sees the second, within one
call only; given the two in two calls it applies neither, or half. Quantised weights and their scales are
such pairs too, and some loaders want all experts of a layer. Names alone say what belongs together.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from convtools.refit.plan import Tensor

Experts = Literal["layer", "each"]
"""All experts of a layer in one call, or one expert a call: fine where nothing but whole experts is read."""

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(?:.+\.)?([^.]+)\.[^.]+$")
_STACKED = re.compile(r"^(.*\.experts)\.[^.]+$")
_FUSED = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv",
    "wq": "qkv", "wk": "qkv", "wv": "qkv",
    "q_a_proj": "qkv_a", "kv_a_proj_with_mqa": "qkv_a",
    "gate_proj": "gate_up", "up_proj": "gate_up", "w1": "gate_up", "w3": "gate_up",
    "in_proj_qkv": "in_proj", "in_proj_z": "in_proj", "in_proj_a": "in_proj", "in_proj_b": "in_proj",
    "in_proj_qkvz": "in_proj", "in_proj_ba": "in_proj",
}  # fmt: skip


class Group(NamedTuple):
    """Tensors that must come in one call."""

    name: str
    """What they have in common."""
    tensors: tuple[int, ...]
    """Their places in the plan."""
    nbytes: int


def group_name(name: str, experts: Experts = "layer") -> str:
    """Tensors for which this is equal must come together.

    >>> group_name("model.layers.0.self_attn.q_proj.weight")
    'model.layers.0.self_attn.qkv'
    >>> group_name("model.layers.0.self_attn.k_proj.weight_scale")
    'model.layers.0.self_attn.qkv'
    >>> group_name("model.layers.0.mlp.experts.7.up_proj.weight")
    'model.layers.0.mlp.experts'
    >>> group_name("model.layers.0.mlp.experts.7.up_proj.weight", "each")
    'model.layers.0.mlp.experts.7'
    """
    if found := _EXPERT.match(name):
        return found[1] if experts == "layer" else f"{found[1]}.{found[2]}"
    if found := _STACKED.match(name):
        return found[1]
    path, _, _ = name.rpartition(".")  # the module: its weight, bias and scales go together
    before, dot, last = path.rpartition(".")
    return f"{before}{dot}{_FUSED[last]}" if last in _FUSED else path or name


def group(tensors: Sequence[Tensor], experts: Experts = "layer") -> tuple[Group, ...]:
    """All tensors, each in one group, in the order in which the groups begin.

    >>> [g.tensors for g in group([Tensor("a.q_proj.weight", "F32", (2,)), Tensor("b.weight", "F32", (1,)),
    ...                            Tensor("a.k_proj.weight", "F32", (2,))])]
    [(0, 2), (1,)]
    """
    found: dict[str, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(group_name(tensor.name, experts), []).append(i)
    return tuple(Group(name, tuple(of), sum(tensors[i].nbytes for i in of)) for name, of in found.items())
