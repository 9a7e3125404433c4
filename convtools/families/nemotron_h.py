"""Nemotron-H and Nemotron-3 (Nano, Super, Ultra): Mamba, attention, MoE and dense layers by a pattern.

Each Hugging Face layer is one block, and layer i is the same layer on both sides. The pattern has
one letter a layer: M Mamba, * attention, E mixture of experts, - dense feed-forward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convtools.errors import AccountingError, capped
from convtools.families.blocks.attention import attention
from convtools.families.blocks.embedding import beside_tied_head, embedding, head
from convtools.families.blocks.mamba import mamba
from convtools.families.blocks.mlp import mlp
from convtools.families.blocks.moe import latent, routed_experts, router, shared_experts
from convtools.families.blocks.mtp import hybrid_mtp
from convtools.families.config import Config, Fields
from convtools.families.hybrid_pattern import hybrid_pattern
from convtools.families.nemotron_h_args import hf_config, megatron_args
from convtools.families.table import LAST, WIDER, Block, Copy, Row, norm, placed

__all__ = [
    "ARCHITECTURES", "NAME", "PROOF", "Spec", "Spelling",
    "copies", "hf_config", "mcore_spelling", "megatron_args", "parse", "rows", "spelling",
]  # fmt: skip

NAME = "nemotron_h"
PROOF = {"NemotronHForCausalLM": "files of real Megatron and Megatron-Bridge"}
ARCHITECTURES = tuple(PROOF)

_MOST_LAYERS, _MOST_MTP, _MOST_EXPERTS, _MOST_TENSORS = 10_000, 64, 65_536, 1_000_000
"""Far above any model; a config that says more is damaged or hostile, and its table would not fit."""

PREFIXES = ("backbone.", "model.")


@dataclass(frozen=True, slots=True)
class Spec:
    """What the config says, under one spelling. Sizes of absent layer kinds are 0."""

    pattern: str
    hidden: int
    vocab: int
    tied: bool
    heads: int
    groups: int
    head_dim: int
    attention_bias: bool
    mlp_bias: bool
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state: int
    conv_kernel: int
    conv_bias: bool
    ffn: int
    experts: int
    expert_ffn: int
    shared_ffn: int
    latent: int
    mtp_pattern: str
    mtp_depth: int
    mtp_repeated: bool | None
    """Whether one physical MTP layer stands for every depth; None: the config does not say."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.pattern)

    @property
    def text(self) -> str:
        """The pattern as Megatron writes it: `ME*E/*E`, one MTP part a depth."""
        return "/".join([self.pattern, *[self.mtp_pattern] * self.mtp_depth])


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a checkpoint names what the config leaves open."""

    prefix: str = "backbone."
    embedding: str = "embeddings.weight"
    stacked_experts: bool = False
    mtp_layers: int | None = None
    """MTP depths that really have weights; None: as the config says."""
    head: bool = False
    """A tied model's file that holds `lm_head.weight` all the same."""

    def __post_init__(self) -> None:
        if self.prefix not in PREFIXES or self.embedding not in ("embeddings.weight", "embedding.weight"):
            raise ValueError(f"no names of this family begin with {self.prefix!r} and {self.embedding!r}")
        if {type(self.stacked_experts), type(self.head)} != {bool} or self.mtp_layers not in (None, 1):
            raise ValueError("stacked_experts and head are true or false, mtp_layers is null or 1")


def parse(config: Config) -> Spec:
    """config.json -> Spec. Raises ConfigError naming every missing or contradictory field."""
    f = Fields(config)
    pattern = hybrid_pattern(f, "hybrid_override_pattern", "layers_block_type", "layer_types")
    depth = f.size("num_nextn_predict_layers", default=0, least=0, most=_MOST_MTP)
    mtp_pattern = hybrid_pattern(f, "mtp_hybrid_override_pattern", "mtp_layers_block_type") if depth else ""
    if pattern and f.size("num_hidden_layers", default=len(pattern)) != len(pattern):
        f.refuse(
            f"`num_hidden_layers` is {config['num_hidden_layers']}, but the pattern has {len(pattern)} layers"
        )
    kinds = set(pattern + mtp_pattern)

    def size(kind: str, *names: str, **options: int) -> int:
        return f.size(*names, **options) if kind in kinds else 0

    for name in ("use_bias", "mamba_proj_bias"):
        if f.flag(name, default=False):
            f.refuse(f"`{name}` is true: Megatron's hybrid layers have no such bias")
    spec = Spec(
        pattern=pattern,
        hidden=f.size("hidden_size"),
        vocab=f.size("vocab_size"),
        tied=f.flag("tie_word_embeddings", default=False),
        heads=size("*", "num_attention_heads"),
        groups=size("*", "num_key_value_heads"),
        head_dim=size("*", "head_dim", "attention_head_dim", default=128),
        attention_bias=f.flag("attention_bias", default=False),
        mlp_bias=f.flag("mlp_bias", default=False),
        mamba_heads=size("M", "mamba_num_heads"),
        mamba_head_dim=size("M", "mamba_head_dim"),
        mamba_groups=size("M", "n_groups"),
        state=size("M", "ssm_state_size"),
        conv_kernel=size("M", "conv_kernel", default=4),
        conv_bias=f.flag("use_conv_bias", default=True),
        ffn=size("-", "intermediate_size"),
        experts=size("E", "n_routed_experts", most=_MOST_EXPERTS),
        expert_ffn=size("E", "moe_intermediate_size"),
        shared_ffn=size("E", "moe_shared_expert_intermediate_size", default=0, least=0)
        if f.size("n_shared_experts", default=1, least=0)
        else 0,
        latent=size("E", "moe_latent_size", default=0, least=0),
        mtp_pattern=mtp_pattern,
        mtp_depth=depth,
        mtp_repeated=None
        if config.get("mtp_use_repeated_layer") is None
        else f.flag("mtp_use_repeated_layer", default=False),
    )
    if "*" in kinds and spec.heads % spec.groups:
        f.refuse(f"num_attention_heads={spec.heads} is not a multiple of num_key_value_heads={spec.groups}")
    if "M" in kinds and spec.mamba_heads % spec.mamba_groups:
        f.refuse(f"mamba_num_heads={spec.mamba_heads} is not a multiple of n_groups={spec.mamba_groups}")
    if spec.mlp_bias and "E" in kinds:
        f.refuse("`mlp_bias` is true in a model with MoE layers: their experts' biases cannot be converted")
    if spec.num_layers > _MOST_LAYERS:
        f.refuse(f"the pattern has {spec.num_layers} layers, expected at most {_MOST_LAYERS}")
    if (count := _tensors(spec)) > _MOST_TENSORS:
        f.refuse(f"the model would have over {count} tensors, expected at most {_MOST_TENSORS}")
    f.done()
    return spec


def _tensors(spec: Spec) -> int:
    """Roughly how many tensors the model has, from below: known before the table is made."""
    kinds = [spec.pattern, *[spec.mtp_pattern] * (1 if spec.mtp_repeated else spec.mtp_depth)]
    layers = sum(map(len, kinds))
    return 2 * layers + 2 * spec.experts * sum(part.count("E") for part in kinds)


def spelling(spec: Spec, hf_names: Iterable[str]) -> Spelling:
    """How these Hugging Face names are spelled. Raises AccountingError where the prefix is unclear."""
    names = set(hf_names)
    found = {
        tail: [p for p in PREFIXES if any(n.startswith(p + tail) for n in names)] for tail in ("layers.", "")
    }
    prefixes = found["layers."] or found[""]
    if len(prefixes) != 1:
        raise AccountingError(
            "the layers' prefix is unclear",
            expected="names under `backbone.` or under `model.`",
            found=capped(prefixes or sorted(names), 4),
        )
    prefix = prefixes[0]
    singular = f"{prefix}embedding.weight" in names and f"{prefix}embeddings.weight" not in names
    return Spelling(
        prefix,
        "embedding.weight" if singular else "embeddings.weight",
        any(n.endswith(".mixer.experts.up_proj") for n in names),
        _physical(
            spec, (n.split(".")[2] for n in names if n.startswith("mtp.layers.")), len(spec.mtp_pattern)
        ),
        spec.tied and "lm_head.weight" in names,
    )


def mcore_spelling(spec: Spec, mcore_names: Iterable[str]) -> Spelling:
    """The published spelling, with as many MTP depths as these Megatron names hold."""
    indices = (n.split(".")[2] for n in mcore_names if n.startswith("mtp.layers."))
    return Spelling(mtp_layers=_physical(spec, indices, 1))


def _physical(spec: Spec, indices: Iterable[str], per_depth: int) -> int | None:
    """MTP depths with weights of their own: one where a repeated layer stands for all."""
    if spec.mtp_repeated is not None or spec.mtp_depth < 2:
        return None
    held = max((int(i) for i in indices if i.isdecimal() and len(i) < 8), default=-1)
    return 1 if held < per_depth else None


def rows(spec: Spec, spelling: Spelling, padded_vocab: int) -> Iterator[Row]:
    """The whole model, a row a Megatron parameter."""
    top, hidden = spelling.prefix, spec.hidden
    vocab = {"vocab": spec.vocab, "padded": padded_vocab, "hidden": hidden}
    yield embedding(top + spelling.embedding, **vocab)
    blocks = {kind: _layer(spec, spelling, kind) for kind in set(spec.pattern + spec.mtp_pattern)}
    for i, kind in enumerate(spec.pattern):
        yield from _placed(blocks[kind], f"decoder.layers.{i}.", f"{top}layers.{i}.", i)
    final = norm("decoder.final_norm.weight", f"{top}norm_f.weight", hidden, "decoder.final_layernorm.weight")
    if spec.tied:
        final = beside_tied_head(final)
    yield from placed([final], "", "", LAST)
    if not spec.tied:
        yield head("lm_head.weight", **vocab, extra_state=True)
    if spec.mtp_depth:
        yield from hybrid_mtp(
            pattern=spec.mtp_pattern,
            depth=spelling.mtp_layers or (1 if spec.mtp_repeated else spec.mtp_depth),
            hidden=hidden,
            layer=lambda kind, mcore, hf: _placed(blocks[kind], mcore, hf, LAST),
        )


def copies(spec: Spec, spelling: Spelling) -> tuple[Copy, ...]:
    """Hugging Face tensors that repeat another."""
    if not spelling.head:
        return ()
    return (
        Copy("lm_head.weight", spelling.prefix + spelling.embedding, "the head is tied to the embedding"),
    )


def _placed(block: tuple[Row, Block], mcore: str, hf: str, stage: int | str) -> Iterator[Row]:
    pre_norm, mixer = block
    yield from placed([pre_norm], mcore, hf, stage)
    yield from placed(mixer, mcore, f"{hf}mixer.", stage)


def _layer(spec: Spec, spelling: Spelling, kind: str) -> tuple[Row, Block]:
    """A layer's pre-norm, and its mixer."""
    h = spec.hidden
    if kind == "M":
        return norm("mixer.in_proj.layer_norm_weight", "norm.weight", h, "norm.weight"), mamba(
            heads=spec.mamba_heads, head_dim=spec.mamba_head_dim, groups=spec.mamba_groups, state=spec.state,
            conv_kernel=spec.conv_kernel, hidden=h, conv_bias=spec.conv_bias,
        )  # fmt: skip
    if kind == "*":
        pre_norm = norm(
            "self_attention.linear_qkv.layer_norm_weight", "norm.weight", h, "input_layernorm.weight"
        )
        return pre_norm, attention(
            heads=spec.heads, groups=spec.groups, head_dim=spec.head_dim, hidden=h,
            qkv_bias=spec.attention_bias, proj_bias=spec.attention_bias,
        )  # fmt: skip
    if kind == "-":
        pre_norm = norm("mlp.linear_fc1.layer_norm_weight", "norm.weight", h, "pre_mlp_layernorm.weight")
        return pre_norm, mlp(hidden=h, ffn=spec.ffn, bias=spec.mlp_bias)
    moe = router(experts=spec.experts, hidden=h, precision=WIDER)
    if spec.latent:
        moe += latent(hidden=h, latent=spec.latent)
    if spec.shared_ffn:
        moe += shared_experts(hidden=h, ffn=spec.shared_ffn)
    moe += routed_experts(
        experts=spec.experts, width=spec.latent or h, ffn=spec.expert_ffn, stacked=spelling.stacked_experts
    )
    return norm("pre_mlp_layernorm.weight", "norm.weight", h), moe
