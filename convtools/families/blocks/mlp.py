"""The dense feed-forward, plain and gated."""

from convtools.families.table import Block, Param, Row, columns, copied, rows
from convtools.layout.parallel import Cut, Part
from convtools.layout.view import View


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


def gate_and_up(label: str, ffn: int) -> Cut:
    """How tensor parallelism cuts `[gate; up]`: each half, so that a rank holds `[gate_r; up_r]`."""
    return Cut(0, (Part("gate", ((label, ffn),)), Part("up", ((label, ffn),))))


def gated_mlp(
    *, hidden: int, ffn: int, mcore: str = "mlp", label: str = "intermediate_size", bias: bool = False
) -> Block:
    """`linear_fc1 [2 * ffn, hidden]` is the gate's rows, then up's; `linear_fc2 [hidden, ffn]` down."""

    def fused(kind: str, *width: int) -> Row:
        fc1 = View(f"{mcore}.linear_fc1.{kind}", (2, ffn), *width)
        return Row(
            Param(fc1.name, fc1.shape, gate_and_up(label, ffn), module=f"{mcore}.linear_fc1"),
            (
                (fc1[0], View(f"gate_proj.{kind}", ffn, *width)),
                (fc1[1], View(f"up_proj.{kind}", ffn, *width)),
            ),
        )

    down = columns((label, ffn))
    block = [
        fused("weight", hidden),
        copied(f"{mcore}.linear_fc2.weight", "down_proj.weight", (hidden, ffn), down, te=True),
    ]
    if bias:
        block += [fused("bias"), copied(f"{mcore}.linear_fc2.bias", "down_proj.bias", (hidden,))]
    return block
