"""Routed experts of GPT-OSS: fused over experts, transposed, gate and up interleaved, with biases.

`[E, in, out]` beside Megatron's `[out, in]`: the table says that it is transposed, whatever the
shapes; where hidden and feed-forward size are equal, nothing else could.
"""

from collections.abc import Iterator

from convtools.families.blocks.mlp import gate_and_up
from convtools.families.table import Block, Expert, Param, Row, columns, copied
from convtools.layout.view import View


def biased_router(*, experts: int, hidden: int) -> Block:
    """The router as a linear layer: `weight [experts, hidden]` and a bias `[experts]` on its logits."""
    return [
        copied("mlp.router.weight", "router.weight", (experts, hidden)),
        copied("mlp.router.bias", "router.bias", (experts,)),
    ]


def interleaved_experts(*, experts: int, width: int, ffn: int) -> Iterator[Row]:
    """Expert e: `linear_fc1 [2 * ffn, width]` is gate, then up; `linear_fc2 [width, ffn]` down.

    Hugging Face: `gate_up_proj [experts, width, 2 * ffn]`, whose columns are g0 u0 g1 u1 and so on,
    `gate_up_proj_bias [experts, 2 * ffn]`, `down_proj [experts, ffn, width]`, `down_proj_bias
    [experts, width]`. The bias of `linear_fc2` is added once, so every etp rank holds it whole.
    """
    label = "intermediate_size"
    halves, down = gate_and_up(label, ffn), columns((label, ffn))
    for e in range(experts):
        of = Expert(e, experts)
        fc1, fc2 = (f"mlp.experts.experts.{e}.linear_fc{i}" for i in (1, 2))
        gate_up = View("experts.gate_up_proj", experts, width, (ffn, 2))[e].permuted(2, 1, 0)
        gate_up_bias = View("experts.gate_up_proj_bias", experts, (ffn, 2))[e].permuted(1, 0)
        transposed = View("experts.down_proj", experts, ffn, width)[e].permuted(1, 0)
        yield Row(
            Param(f"{fc1}.weight", (2 * ffn, width), halves, expert=of, module=fc1),
            ((View(f"{fc1}.weight", (2, ffn), width), gate_up),),
        )
        yield Row(
            Param(f"{fc1}.bias", (2 * ffn,), halves, expert=of),
            ((View(f"{fc1}.bias", (2, ffn)), gate_up_bias),),
        )
        yield Row(
            Param(f"{fc2}.weight", (width, ffn), down, expert=of, module=fc2),
            ((View(f"{fc2}.weight", width, ffn), transposed),),
        )
        yield Row(
            Param(f"{fc2}.bias", (width,), expert=of),
            ((View(f"{fc2}.bias", width), View("experts.down_proj_bias", experts, width)[e]),),
        )
