"""The dense feed-forward without a gate."""

from convtools.families.table import Block, columns, copied, rows


def mlp(
    *, hidden: int, ffn: int, mcore: str = "mlp", label: str = "intermediate_size", bias: bool = False
) -> Block:
    """`linear_fc1 [ffn, hidden]` up, `linear_fc2 [hidden, ffn]` down."""
    block = [
        copied(f"{mcore}.linear_fc1.weight", "up_proj.weight", (ffn, hidden), rows((label, ffn)), te=True),
        copied(
            f"{mcore}.linear_fc2.weight", "down_proj.weight", (hidden, ffn), columns((label, ffn)), te=True
        ),
    ]
    if bias:
        block += [
            copied(f"{mcore}.linear_fc1.bias", "up_proj.bias", (ffn,), rows((label, ffn))),
            copied(f"{mcore}.linear_fc2.bias", "down_proj.bias", (hidden,)),
        ]
    return block
