"""Softmax attention with grouped queries (GQA)."""

from convtools.families.table import Block, Param, Row, columns, copied, norm, rows
from convtools.layout.view import View


def attention(
    *,
    heads: int,
    groups: int,
    head_dim: int,
    hidden: int,
    qkv_bias: bool = False,
    proj_bias: bool = False,
    qk_norm: bool = False,
    sinks: bool = False,
    output_gate: bool = False,
) -> Block:
    """Megatron's `linear_qkv` holds, per query group, its query heads, then its key, then its value.

    `linear_qkv.weight [groups * (r + 2) * head_dim, hidden]` with `r = heads // groups`; the bias
    follows the same rows. Tensor parallelism cuts the fused rows evenly, inside a group where
    there are more ranks than groups. `sinks` add a number a head to the softmax's denominator.

    An `output_gate` doubles the queries: Megatron's group has its query heads, then their gates, then
    key and value; `q_proj` has each head's query followed by its gate.
    """
    r, kinds = heads // groups, 2 if output_gate else 1  # of queries: the query itself, its gate
    cut = rows(
        ("rows of linear_qkv", (kinds * heads + 2 * groups) * head_dim),
        divides=(("num_attention_heads", heads),),
        nests=(("num_key_value_heads", groups),),
    )

    def fused(name: str, *width: int, module: str | None = None, core: str | None = None) -> Row:
        n = kinds * r
        qkv = View(f"self_attention.linear_qkv.{name}", (groups, n + 2, head_dim), *width)
        q = View(f"q_proj.{name}", (groups, r, kinds, head_dim), *width)
        return Row(
            Param(qkv.name, qkv.shape, cut, module=module, memory_state=core),
            (
                *((qkv[:, x * r : (x + 1) * r], q[:, :, x]) for x in range(kinds)),
                (qkv[:, n], View(f"k_proj.{name}", (groups, head_dim), *width)),
                (qkv[:, n + 1], View(f"v_proj.{name}", (groups, head_dim), *width)),
            ),
        )

    proj, qkv_module = "self_attention.linear_proj", "self_attention.linear_qkv"
    heads_out = columns(("num_attention_heads", heads), ("head_dim", head_dim))
    # Only a core attention with weights of its own, the sinks, saves its state in `torch_dist` too.
    core = None if sinks else "self_attention.core_attention"
    block = [fused("weight", hidden, module=qkv_module, core=core)]
    block += [copied(f"{proj}.weight", "o_proj.weight", (hidden, heads * head_dim), heads_out, te=True)]
    if qkv_bias:
        block += [fused("bias")]
    if proj_bias:
        block += [copied(f"{proj}.bias", "o_proj.bias", (hidden,))]
    if sinks:
        offset = "self_attention.core_attention.softmax_offset"
        block += [copied(offset, "sinks", (heads,), rows(("num_attention_heads", heads)), te=True)]
    if qk_norm:
        block += [norm(f"self_attention.{x}_layernorm.weight", f"{x}_norm.weight", head_dim) for x in "qk"]
    return block
