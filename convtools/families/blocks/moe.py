"""Mixture of experts: router, routed experts, shared experts, latent projections."""

from collections.abc import Iterator

from convtools.families.blocks.mlp import mlp
from convtools.families.table import FP32, Block, Expert, Param, Row, columns, copied, placed, rows
from convtools.layout.parallel import Cut
from convtools.layout.view import View


def router(*, experts: int, hidden: int) -> Block:
    """The router `[experts, hidden]` and its correction bias `[experts]`, which is fp32 on both sides."""
    return [
        copied("mlp.router.weight", "gate.weight", (experts, hidden)),
        copied("mlp.router.expert_bias", "gate.e_score_correction_bias", (experts,), precision=FP32),
    ]


def latent(*, hidden: int, latent: int) -> Block:
    """The projections into and out of the routed experts' narrower space; every rank holds them whole."""
    return [
        copied("mlp.fc1_latent_proj.weight", "fc1_latent_proj.weight", (latent, hidden), te=True),
        copied("mlp.fc2_latent_proj.weight", "fc2_latent_proj.weight", (hidden, latent), te=True),
    ]


def shared_experts(*, hidden: int, ffn: int) -> Block:
    """The shared experts: one dense feed-forward, cut by tp (not etp)."""
    block = mlp(
        hidden=hidden, ffn=ffn, mcore="mlp.shared_experts", label="moe_shared_expert_intermediate_size"
    )
    return list(placed(block, "", "shared_experts.", 0))


def routed_experts(*, experts: int, width: int, ffn: int, stacked: bool = False) -> Iterator[Row]:
    """Expert e: `linear_fc1 [ffn, width]`, `linear_fc2 [width, ffn]`.

    Hugging Face holds each expert by name (`experts.{e}.up_proj.weight`) or, `stacked`, all of
    them in one tensor (`experts.up_proj [experts, ffn, width]`).
    """
    by_ffn = ("moe_intermediate_size", ffn)
    for e in range(experts):
        yield _expert("linear_fc1", "up_proj", (ffn, width), rows(by_ffn), Expert(e, experts), stacked)
        yield _expert("linear_fc2", "down_proj", (width, ffn), columns(by_ffn), Expert(e, experts), stacked)


def _expert(linear: str, hf: str, shape: tuple[int, int], cut: Cut, expert: Expert, stacked: bool) -> Row:
    e = expert.index
    mcore = View(f"mlp.experts.experts.{e}.{linear}.weight", *shape)
    other = (
        View(f"experts.{hf}", expert.count, *shape)[e]
        if stacked
        else View(f"experts.{e}.{hf}.weight", *shape)
    )
    module = f"mlp.experts.experts.{e}.{linear}"
    return Row(Param(mcore.name, shape, cut, expert=expert, module=module), ((mcore, other),))
