"""Qwen3-Next and the text models of Qwen3.5: GDN and output-gated attention in turn, dense or MoE, MTP.

All norms are centred on zero on both sides but one: GDN's `out_norm`, which only Megatron centres.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from convtools.families.blocks.attention import attention
from convtools.families.blocks.embedding import embedding, head
from convtools.families.blocks.gdn import gdn
from convtools.families.blocks.mlp import gated_mlp
from convtools.families.blocks.moe import gated_moe
from convtools.families.blocks.mtp import gpt_mtp, gpt_mtp_layer
from convtools.families.config import Config, Fields
from convtools.families.qwen_next_args import hf_config, megatron_args
from convtools.families.table import LAST, Block, Copy, Row, norm, placed

__all__ = [
    "ARCHITECTURES", "NAME", "PROOF", "Spec", "Spelling",
    "copies", "hf_config", "mcore_spelling", "megatron_args", "parse", "rows", "spelling",
]  # fmt: skip

NAME = "qwen_next"
PROOF = {
    "Qwen3NextForCausalLM": "files of real Megatron and Megatron-Bridge at tp 1; ranks, MTP: rows by hand",
    "Qwen3_5ForCausalLM": "parts of Qwen3-Next, transformers' own model, rows by hand, and round trips",
    "Qwen3_5MoeForCausalLM": "parts of Qwen3-Next, transformers' own model, rows by hand, and round trips",
}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)
SHIFTED = dict.fromkeys(PROOF, "`linear_attn.norm.weight`, centred on zero by Megatron only")
"""What is computed and not copied, by architecture: it may not come back bit for bit."""

_FUSED, _MTP = ".mlp.experts.gate_up_proj", "mtp.layers.0."
_MOST_TENSORS = 1_000_000


@dataclass(frozen=True, slots=True)
class Spec:
    """What the config says."""

    linear: tuple[bool, ...]
    """Which layers have linear attention (GDN) in place of softmax attention."""
    sparse: tuple[bool, ...]
    """Which layers have experts in place of a dense feed-forward."""
    hidden: int
    vocab: int
    tied: bool
    heads: int
    groups: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    ffn: int
    experts: int
    expert_ffn: int
    shared_ffn: int
    by_key_head: bool
    """Hugging Face groups GDN's projections by key head (Qwen3-Next), or not (Qwen3.5)."""
    mtp_depth: int = 0
    """MTP layers that the config tells of; that of Qwen3-Next is silent about its one."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.linear)

    @property
    def text(self) -> str:
        """GDN `G` or attention `*`, then a dense `-` or expert `E` feed-forward, a layer."""
        kinds = zip(self.linear, self.sparse, strict=True)
        return "".join(("G" if linear else "*") + ("E" if sparse else "-") for linear, sparse in kinds)


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a checkpoint names what the config leaves open."""

    head: bool = False
    """A tied model's file that holds `lm_head.weight` all the same."""
    mtp: bool = False
    """An MTP layer is there: published models have it, those that transformers saved do not."""
    fused_experts: bool = False
    """All experts of a layer in one tensor, or each under its number."""
    fused_mtp_experts: bool = False
    """The same of the MTP layer: Qwen3.5 fuses the layers' experts only, Qwen3.6 these too."""

    def __post_init__(self) -> None:
        if any(
            type(x) is not bool for x in (self.head, self.mtp, self.fused_experts, self.fused_mtp_experts)
        ):
            raise ValueError("every field of the spelling is true or false")


def parse(config: Config) -> Spec:
    """config.json -> Spec. Raises ConfigError."""
    f = Fields(config)
    if f.flag("attention_bias", default=False):
        f.refuse("`attention_bias` is true: no published model has that")
    n = f.size("num_hidden_layers", most=10_000)
    experts = f.size("num_experts", "num_local_experts", default=0, least=0, most=65_536)
    sparse = _sparse(f, n) if experts else (False,) * n
    any_sparse, any_dense = any(sparse), not all(sparse)
    spec = Spec(
        linear=_linear(f, n),
        sparse=sparse,
        hidden=f.size("hidden_size"),
        vocab=f.size("vocab_size"),
        tied=f.flag("tie_word_embeddings", default=False),
        heads=f.size("num_attention_heads"),
        groups=f.size("num_key_value_heads"),
        head_dim=f.size("head_dim", default=256),
        key_heads=f.size("linear_num_key_heads"),
        value_heads=f.size("linear_num_value_heads"),
        key_dim=f.size("linear_key_head_dim"),
        value_dim=f.size("linear_value_head_dim"),
        conv_kernel=f.size("linear_conv_kernel_dim", default=4),
        ffn=f.size("intermediate_size") if any_dense else f.size("intermediate_size", default=0, least=0),
        experts=experts if any_sparse else 0,
        expert_ffn=f.size("moe_intermediate_size") if any_sparse else 0,
        shared_ffn=f.size("shared_expert_intermediate_size", default=0, least=0) if any_sparse else 0,
        by_key_head=_is_next(config),
        mtp_depth=f.size("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0, least=0),
    )
    if spec.heads % spec.groups:
        f.refuse(f"num_attention_heads={spec.heads} is not a multiple of num_key_value_heads={spec.groups}")
    if spec.value_heads % spec.key_heads:
        f.refuse(
            f"linear_num_value_heads={spec.value_heads} is not a multiple of "
            f"linear_num_key_heads={spec.key_heads}"
        )
    if spec.mtp_depth > 1:
        f.refuse(f"`mtp_num_hidden_layers` is {spec.mtp_depth}: no published model has more than one")
    if (count := 2 * n + 2 * spec.experts * sum(sparse)) > _MOST_TENSORS:
        f.refuse(f"the model would have over {count} tensors, expected at most {_MOST_TENSORS}")
    f.done()
    return spec


def _is_next(config: Config) -> bool:
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else config.get("model_type")
    return str(first).lower().replace("_", "").startswith("qwen3next")


def _linear(f: Fields, n: int) -> tuple[bool, ...]:
    """`layer_types`, or every so many layers one of softmax attention."""
    types = f.get("layer_types", default=None)
    if types is None:
        every = f.size("full_attention_interval", default=4)
        return tuple((i + 1) % every != 0 for i in range(n))
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != n or any(t not in known for t in types):
        f.refuse(f"`layer_types` is not a list of {n} times {' or '.join(known)}")
        return (False,) * n
    return tuple(t == known[0] for t in types)


def _sparse(f: Fields, n: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`th layer has experts, but those in `mlp_only_layers`."""
    step, dense = f.size("decoder_sparse_step", default=1), f.get("mlp_only_layers", default=[])
    if not isinstance(dense, list) or any(type(i) is not int or not 0 <= i < n for i in dense):
        f.refuse(f"`mlp_only_layers` is not a list of numbers from 0 to {n - 1}")
        return (True,) * n
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(n))


def spelling(spec: Spec, hf_names: Iterable[str]) -> Spelling:
    """How these names are spelled."""
    names = set(hf_names)
    fused = {n for n in names if n.endswith(_FUSED)}
    return Spelling(
        head=spec.tied and "lm_head.weight" in names,
        mtp=any(n.startswith("mtp.") for n in names),
        fused_experts=any(not n.startswith("mtp.") for n in fused),
        fused_mtp_experts=any(n.startswith("mtp.") for n in fused),
    )


def mcore_spelling(spec: Spec, mcore_names: Iterable[str]) -> Spelling:
    """The published spelling, with an MTP layer where these Megatron names have one."""
    mtp = any(n.startswith("mtp.") for n in mcore_names)
    return Spelling(mtp=mtp, fused_experts=bool(spec.experts) and not spec.by_key_head)


def rows(spec: Spec, spelling: Spelling, padded_vocab: int) -> Iterator[Row]:
    """The whole model, a row a Megatron parameter; layers differ, so `torch_dist` stacks none."""
    top, h = "model.", spec.hidden
    yield embedding(f"{top}embed_tokens.weight", vocab=spec.vocab, padded=padded_vocab, hidden=h)
    kinds = list(zip(spec.linear, spec.sparse, strict=True))
    parts = {kind: _layer(spec, *kind, fused=spelling.fused_experts) for kind in set(kinds)}
    for i, kind in enumerate(kinds):
        for module, block in parts[kind]:
            yield from placed(block, f"decoder.layers.{i}.", f"{top}layers.{i}.{module}", i)
    final = norm("decoder.final_layernorm.weight", f"{top}norm.weight", h)
    if spec.tied:  # the head has no weight of its own, but a module that saves its state
        final = replace(final, param=replace(final.param, memory_state="output_layer"))
    yield from placed([final], "", "", LAST)
    if not spec.tied:
        yield head("lm_head.weight", vocab=spec.vocab, padded=padded_vocab, hidden=h)
    if spelling.mtp:
        yield from _mtp(spec, spelling)


def _mtp(spec: Spec, spelling: Spelling) -> Iterator[Row]:
    """One depth: softmax attention, and a feed-forward of the last layer's kind, as Megatron builds it."""
    entry = gpt_mtp(
        spec.hidden, enorm="pre_fc_norm_embedding.weight", hnorm="pre_fc_norm_hidden.weight",
        eh_proj="fc.weight", final="norm.weight",
    )  # fmt: skip
    yield from placed(entry, _MTP, "mtp.", LAST)
    for module, block in _layer(spec, False, spec.sparse[-1], fused=spelling.fused_mtp_experts):
        yield from gpt_mtp_layer(block, _MTP, f"{_MTP}{module}")


def copies(spec: Spec, spelling: Spelling) -> tuple[Copy, ...]:
    """Hugging Face tensors that repeat another."""
    tied = Copy("lm_head.weight", "model.embed_tokens.weight", "the head is tied to the embedding")
    return (tied,) if spelling.head else ()


def _layer(spec: Spec, linear: bool, sparse: bool, *, fused: bool) -> list[tuple[str, Block]]:
    """(Hugging Face module, its block) of one layer."""
    h, module = spec.hidden, "in_proj" if linear else "linear_qkv"
    attention_norm = f"self_attention.{module}.layer_norm_weight"
    norms = [norm(attention_norm, "input_layernorm.weight", h, "input_layernorm.weight")]
    mlp_norm, hf_norm = "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"
    if sparse:
        norms += [norm(mlp_norm, hf_norm, h)]
    else:
        norms += [norm("mlp.linear_fc1.layer_norm_weight", hf_norm, h, mlp_norm)]
    mixer = ("linear_attn.", _gdn(spec)) if linear else ("self_attn.", _attention(spec))
    return [("", norms), mixer, ("mlp.", _feed_forward(spec, sparse, fused))]


def _gdn(spec: Spec) -> Block:
    return gdn(
        key_heads=spec.key_heads, value_heads=spec.value_heads, key_dim=spec.key_dim,
        value_dim=spec.value_dim, conv_kernel=spec.conv_kernel, hidden=spec.hidden,
        by_key_head=spec.by_key_head,
    )  # fmt: skip


def _attention(spec: Spec) -> Block:
    return attention(
        heads=spec.heads, groups=spec.groups, head_dim=spec.head_dim, hidden=spec.hidden,
        qk_norm=True, output_gate=True,
    )  # fmt: skip


def _feed_forward(spec: Spec, sparse: bool, fused: bool) -> Block:
    if not sparse:
        return gated_mlp(hidden=spec.hidden, ffn=spec.ffn)
    return gated_moe(
        hidden=spec.hidden, experts=spec.experts, ffn=spec.expert_ffn, fused=fused,
        shared_ffn=spec.shared_ffn, shared_module="shared_expert.", shared_gate=spec.shared_ffn > 0,
    )  # fmt: skip
