"""The GPT of Megatron: layers of one attention and one feed-forward each, all alike or not.

A family file says how its config and its tensors are spelled; what they have in common is here.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from convtools.errors import AccountingError, capped
from convtools.families.blocks.attention import attention
from convtools.families.blocks.embedding import embedding, head
from convtools.families.blocks.mlp import gated_mlp
from convtools.families.blocks.moe import gated_moe
from convtools.families.blocks.mtp import gpt_mtp, gpt_mtp_layer
from convtools.families.config import Fields
from convtools.families.gpt_args import arg, derived, megatron_args, plain_gpt, rope_theta
from convtools.families.table import LAST, MODEL, Block, Copy, Row, norm, placed

__all__ = [
    "GATED", "Layer", "Spec", "Spelling", "arg", "base", "check_size", "copies", "derived", "experts_of",
    "feed_forward", "mcore_spelling", "megatron_args", "model", "mtp_depth_of", "plain_gpt", "rope_theta",
    "rows", "spelling",
]  # fmt: skip

_PREFIX = re.compile(r"([a-z_]{1,32}\.){0,4}")
_MOST_LAYERS, _MOST_MTP, _MOST_EXPERTS, _MOST_TENSORS = 10_000, 64, 65_536, 1_000_000

GATED = ("gate_proj", "up_proj", "down_proj")

Layer = Callable[[bool], list[tuple[str, Block]]]
"""Whether its feed-forward is one of experts -> (Hugging Face module, its block) of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the config says. `experts` 0: a dense feed-forward."""

    num_layers: int
    hidden: int
    vocab: int
    tied: bool
    heads: int
    groups: int
    head_dim: int
    ffn: int
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    expert_ffn: int = 0
    moe_layers: tuple[bool, ...] | None = None
    """Which layers have experts. None: they are all alike, and `torch_dist` stacks them."""
    moe_module: str = "mlp."
    """Hugging Face module of the experts, within a layer; fused experts are always in `mlp.`."""
    expert_names: tuple[str, str, str] = GATED
    """Hugging Face names of an expert's gate, up and down."""
    expert_bias: bool = False
    """A correction bias on the router's scores."""
    router_precision: str = MODEL
    shared_ffn: int = 0
    """Width of the shared experts together; 0: there are none."""
    shared_module: str = "shared_experts."
    shared_gate: bool = False
    mtp_depth: int = 0

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Of each layer, whether its feed-forward is one of experts."""
        return (self.experts > 0,) * self.num_layers if self.moe_layers is None else self.moe_layers

    @property
    def text(self) -> str:
        """Attention `*`, then a dense `-` or expert `E` feed-forward, a layer; one part an MTP depth."""
        if self.moe_layers is None:
            return f"{'*E' if self.experts else '*-'} x {self.num_layers}"
        layers = "".join("*E" if moe else "*-" for moe in self.moe_layers)
        return "/".join([layers, *["*E"] * self.mtp_depth])


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a checkpoint names what the config leaves open."""

    prefix: str = "model."
    head: bool = False
    """A tied model's file that holds `lm_head.weight` all the same."""
    fused_experts: bool = False
    """All experts of a layer in one 3-D tensor, as transformers 5 holds them in memory."""
    mtp: bool = True
    """False: the config has MTP layers, the tensors have none (transformers leaves them out)."""
    mtp_embedding: bool = False
    """MTP layers that carry `embed_tokens`, a copy of the model's own."""
    mtp_head: bool = False
    """MTP layers that carry `shared_head.head`, a copy of the model's own."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str) or not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"no names of this family begin with {self.prefix!r}")
        wrong = [f.name for f in fields(self) if f.type is bool and type(getattr(self, f.name)) is not bool]
        if wrong:
            raise ValueError(f"{wrong[0]} is true or false")


def base(f: Fields, **more: Any) -> Spec:
    """The fields that every GPT config has, under one spelling."""
    heads = f.size("num_attention_heads")
    hidden = f.size("hidden_size")
    groups = f.size("num_key_value_heads", default=heads)
    if heads % groups:
        f.refuse(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
    spec = Spec(
        num_layers=f.size("num_hidden_layers", most=_MOST_LAYERS),
        hidden=hidden,
        vocab=f.size("vocab_size"),
        heads=heads,
        groups=groups,
        head_dim=f.size("head_dim", default=max(1, hidden // heads)),
        **({"ffn": f.size("intermediate_size")} | more),
    )
    check_size(f, spec)
    return spec


def experts_of(f: Fields) -> int:
    """The number of routed experts, under any of its names."""
    return f.size("num_experts", "num_local_experts", "n_routed_experts", most=_MOST_EXPERTS)


def mtp_depth_of(f: Fields) -> int:
    """The number of MTP layers, as published configs and transformers 5 name it."""
    return f.size("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0, most=_MOST_MTP)


def check_size(f: Fields, spec: Spec) -> None:
    """Refuse a model of far more tensors than any has: its table would take all memory."""
    count = 2 * spec.num_layers + 2 * spec.experts * (sum(spec.kinds) + spec.mtp_depth)
    if count > _MOST_TENSORS:
        f.refuse(f"the model would have over {count} tensors, expected at most {_MOST_TENSORS}")


def spelling(spec: Spec, hf_names: Iterable[str]) -> Spelling:
    """How these names are spelled. Raises AccountingError where the prefix is unclear."""
    names = set(hf_names)
    tail = "embed_tokens.weight"
    found = (n.removesuffix(tail) for n in names if n.endswith(tail))
    prefixes = sorted(p for p in found if _PREFIX.fullmatch(p))
    if len(prefixes) != 1:
        raise AccountingError(
            "the layers' prefix is unclear",
            expected=f"one tensor whose name ends in `{tail}`",
            found=capped(prefixes or sorted(names), 4),
        )
    at = [f"{prefixes[0]}layers.{spec.num_layers + o}." for o in range(spec.mtp_depth)]
    return Spelling(
        prefixes[0],
        head=spec.tied and "lm_head.weight" in names,
        fused_experts=any(n.endswith(".experts.gate_up_proj") for n in names),
        mtp=not at or any(n.startswith(tuple(at)) for n in names),
        mtp_embedding=any(f"{layer}{tail}" in names for layer in at),
        mtp_head=any(f"{layer}shared_head.head.weight" in names for layer in at),
    )


def mcore_spelling(spec: Spec, mcore_names: Iterable[str]) -> Spelling:
    """The published spelling, without the copies that Megatron does not hold."""
    return Spelling(mtp=not spec.mtp_depth or any(n.startswith("mtp.") for n in mcore_names))


def rows(spec: Spec, spelling: Spelling, padded_vocab: int) -> Iterator[Row]:
    """The whole model, a row a Megatron parameter."""
    return model(spec, spelling, padded_vocab, lambda moe: _layer(spec, spelling, moe))


def model(spec: Spec, spelling: Spelling, padded_vocab: int, layer: Layer) -> Iterator[Row]:
    """Embedding, layers, head and MTP layers; `torch_dist` stacks the layers where they are all alike."""
    top, hidden, kinds = spelling.prefix, spec.hidden, spec.kinds
    yield embedding(f"{top}embed_tokens.weight", vocab=spec.vocab, padded=padded_vocab, hidden=hidden)
    parts = {moe: layer(moe) for moe in {*kinds, *([True] if spec.mtp_depth else [])}}
    alike = spec.num_layers if spec.moe_layers is None else 0
    for i, moe in enumerate(kinds):
        for module, block in parts[moe]:
            yield from placed(block, f"decoder.layers.{i}.", f"{top}layers.{i}.{module}", i, alike)
    final = norm("decoder.final_layernorm.weight", f"{top}norm.weight", hidden)
    if spec.tied:  # the head has no weight of its own, but a module that saves its state
        final = replace(final, param=replace(final.param, memory_state="output_layer"))
    yield from placed([final], "", "", LAST)
    if not spec.tied:
        yield head("lm_head.weight", vocab=spec.vocab, padded=padded_vocab, hidden=hidden)
    for o in range(spec.mtp_depth if spelling.mtp else 0):
        mcore, hf = f"mtp.layers.{o}.", f"{top}layers.{spec.num_layers + o}."
        yield from placed(gpt_mtp(hidden), mcore, hf, LAST)
        for module, block in parts[True]:
            yield from gpt_mtp_layer(block, mcore, f"{hf}{module}")


def copies(spec: Spec, spelling: Spelling) -> tuple[Copy, ...]:
    """Hugging Face tensors that repeat another."""
    tokens = f"{spelling.prefix}embed_tokens.weight"
    out = [Copy("lm_head.weight", tokens, "the head is tied to the embedding")] if spelling.head else []
    why = "an MTP layer's copy"
    for o in range(spec.mtp_depth if spelling.mtp else 0):
        at = f"{spelling.prefix}layers.{spec.num_layers + o}."
        if spelling.mtp_embedding:
            out.append(Copy(f"{at}embed_tokens.weight", tokens, why))
        if spelling.mtp_head:
            out.append(Copy(f"{at}shared_head.head.weight", tokens if spec.tied else "lm_head.weight", why))
    return tuple(out)


def _layer(spec: Spec, spelling: Spelling, moe: bool) -> list[tuple[str, Block]]:
    """(Hugging Face module, its block) of one layer."""
    attn = attention(
        heads=spec.heads, groups=spec.groups, head_dim=spec.head_dim, hidden=spec.hidden,
        qkv_bias=spec.qkv_bias, proj_bias=spec.proj_bias, qk_norm=spec.qk_norm,
    )  # fmt: skip
    qkv_norm = "self_attention.linear_qkv.layer_norm_weight"
    first = norm(qkv_norm, "input_layernorm.weight", spec.hidden, "input_layernorm.weight")
    second, module, block = feed_forward(spec, spelling, moe)
    return [("", [first, second]), ("self_attn.", attn), (module, block)]


def feed_forward(spec: Spec, spelling: Spelling, moe: bool) -> tuple[Row, str, Block]:
    """(its norm, its Hugging Face module, its block) of one layer's feed-forward."""
    h, after = spec.hidden, "post_attention_layernorm.weight"
    if not moe:
        fc1_norm = norm("mlp.linear_fc1.layer_norm_weight", after, h, "pre_mlp_layernorm.weight")
        return fc1_norm, "mlp.", gated_mlp(hidden=h, ffn=spec.ffn, bias=spec.mlp_bias)
    block = gated_moe(
        hidden=h, experts=spec.experts, ffn=spec.expert_ffn, names=spec.expert_names,
        fused=spelling.fused_experts, expert_bias=spec.expert_bias, router_precision=spec.router_precision,
        shared_ffn=spec.shared_ffn, shared_module=spec.shared_module, shared_gate=spec.shared_gate,
    )  # fmt: skip
    module = "mlp." if spelling.fused_experts else spec.moe_module
    # Megatron's local layer spec saves it in `torch_dist` as if a dense `linear_fc1` followed
    return norm("pre_mlp_layernorm.weight", after, h, "mlp.linear_fc1.layer_norm_weight"), module, block
