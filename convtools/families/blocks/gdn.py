"""The gated delta net (GDN): linear attention of Qwen3-Next and Qwen3.5."""

from dataclasses import replace

from convtools.families.table import EITHER, Block, Param, Row, columns, copied, rows
from convtools.layout.parallel import Cut, Part
from convtools.layout.view import View


def gdn(
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_kernel: int,
    hidden: int,
    by_key_head: bool,
) -> Block:
    """Megatron's `in_proj` stacks query, key, value, z, beta, alpha; `conv1d` query, key, value.

    Tensor parallelism cuts each of them on its own, and `torch_dist` gives each a key of its own.
    Hugging Face, `by_key_head` (Qwen3-Next): `in_proj_qkvz` holds, per key head, its query, its key,
    the values and the z of its value heads, `in_proj_ba` their b (beta) and a (alpha). Else
    (Qwen3.5) `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` lie as in Megatron.
    `out_norm` is the one norm that only Megatron centres on zero.
    """
    by_key, by_value = ("linear_num_key_heads", key_heads), ("linear_num_value_heads", value_heads)
    keys = (by_key, ("linear_key_head_dim", key_dim))
    values = (by_value, ("linear_value_head_dim", value_dim))
    query, key, value, z = Part("query", keys), Part("key", keys), Part("value", values), Part("z", values)
    beta, alpha = Part("beta", (by_value,)), Part("alpha", (by_value,))
    parts, conv = (query, key, value, z, beta, alpha), Cut(0, (query, key, value))
    a, conv_dim = "self_attention.", sum(p.size for p in conv.parts)
    in_proj = View(f"{a}in_proj.weight", sum(p.size for p in parts), hidden)
    param = Param(in_proj.name, in_proj.shape, Cut(0, parts), split=True, module=f"{a}in_proj")
    relate = _by_key_head if by_key_head else _flat
    heads_cut = rows(by_value)
    out_norm = copied(f"{a}out_norm.weight", "norm.weight", (value_dim,), te=True, precision=EITHER)
    return [
        Row(param, relate(in_proj, parts, key_heads)),
        copied(f"{a}conv1d.weight", "conv1d.weight", (conv_dim, 1, conv_kernel), conv, split=True),
        copied(f"{a}A_log", "A_log", (value_heads,), heads_cut, precision=EITHER),
        copied(f"{a}dt_bias", "dt_bias", (value_heads,), heads_cut, precision=EITHER),
        replace(out_norm, param=replace(out_norm.param, shift=-1)),
        copied(f"{a}out_proj.weight", "out_proj.weight", (hidden, value.size), columns(*values), te=True),
    ]  # fmt: skip


Relation = tuple[tuple[View, View], ...]


def _by_key_head(in_proj: View, parts: tuple[Part, ...], key_heads: int) -> Relation:
    """Two tensors whose rows are grouped by key head: a head's rows of each part follow each other."""
    hidden, at, out = in_proj.shape[1], 0, []
    for name, group in (("in_proj_qkvz.weight", parts[:4]), ("in_proj_ba.weight", parts[4:])):
        share = [part.size // key_heads for part in group]
        hf, first = View(name, (key_heads, sum(share)), hidden), 0
        for part, n in zip(group, share, strict=True):
            mine = in_proj[at : at + part.size].factored(0, key_heads, n)
            out.append((mine, hf[:, first : first + n]))
            at, first = at + part.size, first + n
    return tuple(out)


def _flat(in_proj: View, parts: tuple[Part, ...], key_heads: int) -> Relation:
    """Four tensors, each a run of Megatron's rows."""
    hidden, at, out = in_proj.shape[1], 0, []
    for name, group in (("qkv", parts[:3]), ("z", parts[3:4]), ("b", parts[4:5]), ("a", parts[5:])):
        n = sum(part.size for part in group)
        out.append((in_proj[at : at + n], View(f"in_proj_{name}.weight", n, hidden)))
        at += n
    return tuple(out)
