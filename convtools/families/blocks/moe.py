"""Mixture of experts: router, routed experts, shared experts, latent projections."""

from collections.abc import Iterator

from convtools.families.blocks.mlp import gate_and_up, gated_mlp, mlp
from convtools.families.table import FP32, MODEL, Block, Expert, Param, Row, columns, copied, placed, rows
from convtools.layout.parallel import Cut
from convtools.layout.view import View


def router(*, experts: int, hidden: int, bias: bool = True, precision: str = MODEL) -> Block:
    """The router `[experts, hidden]` and its correction bias `[experts]`, which is fp32 on both sides."""
    block = [copied("mlp.router.weight", "gate.weight", (experts, hidden), precision=precision)]
    if bias:
        block += [
            copied("mlp.router.expert_bias", "gate.e_score_correction_bias", (experts,), precision=FP32)
        ]
    return block


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


def shared_expert_gate(hidden: int) -> Block:
    """What the shared expert's output is weighted with: `gate_weight [1, hidden]`, whole on every rank."""
    return [copied("mlp.shared_experts.gate_weight", "shared_expert_gate.weight", (1, hidden))]


def gated_experts(
    *,
    experts: int,
    width: int,
    ffn: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    fused: bool = False,
) -> Iterator[Row]:
    """Expert e: `linear_fc1 [2 * ffn, width]` is gate, then up; `linear_fc2 [width, ffn]` down.

    Hugging Face holds each expert by name, where `names` are those of gate, up and down (Mixtral:
    w1, w3, w2), or, `fused`, all of them in `experts.gate_up_proj [experts, 2 * ffn, width]`, gate
    rows first, and `experts.down_proj [experts, width, ffn]`.
    """
    label = "moe_intermediate_size"
    gate, up, down = names
    for e in range(experts):
        at, of = f"mlp.experts.experts.{e}", Expert(e, experts)
        fc1 = View(f"{at}.linear_fc1.weight", (2, ffn), width)
        param = Param(fc1.name, fc1.shape, gate_and_up(label, ffn), expert=of, module=f"{at}.linear_fc1")
        if fused:
            yield Row(param, ((fc1, View("experts.gate_up_proj", experts, (2, ffn), width)[e]),))
        else:
            halves = (
                View(f"experts.{e}.{gate}.weight", ffn, width),
                View(f"experts.{e}.{up}.weight", ffn, width),
            )
            yield Row(param, ((fc1[0], halves[0]), (fc1[1], halves[1])))
        fc2 = "down_proj" if fused else down
        yield _expert("linear_fc2", fc2, (width, ffn), columns((label, ffn)), of, stacked=fused)


def gated_moe(
    *,
    hidden: int,
    experts: int,
    ffn: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    fused: bool = False,
    expert_bias: bool = False,
    router_precision: str = MODEL,
    shared_ffn: int = 0,
    shared_module: str = "shared_experts.",
    shared_gate: bool = False,
) -> Block:
    """A whole feed-forward of gated experts: router, routed experts, and shared ones where there are any."""
    block = router(experts=experts, hidden=hidden, bias=expert_bias, precision=router_precision)
    block += gated_experts(experts=experts, width=hidden, ffn=ffn, names=names, fused=fused)
    if shared_ffn:
        label = "moe_shared_expert_intermediate_size"
        shared = gated_mlp(hidden=hidden, ffn=shared_ffn, mcore="mlp.shared_experts", label=label)
        block += placed(shared, "", shared_module, 0)
    if shared_gate:
        block += shared_expert_gate(hidden)
    return block
