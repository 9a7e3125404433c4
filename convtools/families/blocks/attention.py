"""Softmax attention with grouped queries (GQA)."""

from convtools.families.table import Block, Param, Row, columns, copied, rows
from convtools.layout.view import View


def attention(*, heads: int, groups: int, head_dim: int, hidden: int, bias: bool = False) -> Block:
    """Megatron's `linear_qkv` holds, per query group, its query heads, then its key, then its value.

    `linear_qkv.weight [groups * (r + 2) * head_dim, hidden]` with `r = heads // groups`; the bias
    follows the same rows. Tensor parallelism cuts the fused rows evenly, inside a group where
    there are more ranks than groups.
    """
    r = heads // groups
    cut = rows(
        ("rows of linear_qkv", (heads + 2 * groups) * head_dim),
        divides=(("num_attention_heads", heads),),
        nests=(("num_key_value_heads", groups),),
    )

    def fused(name: str, *width: int, module: str | None = None, core: str | None = None) -> Row:
        qkv = View(f"self_attention.linear_qkv.{name}", (groups, r + 2, head_dim), *width)
        return Row(
            Param(qkv.name, qkv.shape, cut, module=module, memory_state=core),
            (
                (qkv[:, :r], View(f"q_proj.{name}", (groups, r, head_dim), *width)),
                (qkv[:, r], View(f"k_proj.{name}", (groups, head_dim), *width)),
                (qkv[:, r + 1], View(f"v_proj.{name}", (groups, head_dim), *width)),
            ),
        )

    proj, qkv_module = "self_attention.linear_proj", "self_attention.linear_qkv"
    heads_out = columns(("num_attention_heads", heads), ("head_dim", head_dim))
    block = [fused("weight", hidden, module=qkv_module, core="self_attention.core_attention")]
    block += [copied(f"{proj}.weight", "o_proj.weight", (hidden, heads * head_dim), heads_out, te=True)]
    if bias:
        block += [fused("bias"), copied(f"{proj}.bias", "o_proj.bias", (hidden,))]
    return block
