"""The GPT of Megatron: layers of one attention and one feed-forward each, all alike.

A family file says how its config and its tensors are spelled; what they have in common is here.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from convtools.errors import AccountingError, capped
from convtools.families.blocks.attention import attention
from convtools.families.blocks.embedding import embedding, head
from convtools.families.blocks.mlp import gated_mlp
from convtools.families.blocks.moe import gated_experts, router
from convtools.families.config import Config, Fields
from convtools.families.table import LAST, Block, Copy, Row, norm, placed

_PREFIX = re.compile(r"([a-z_]{1,32}\.){0,4}")

GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
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
    moe_module: str = "mlp."
    """Hugging Face module of the experts, within a layer."""
    expert_names: tuple[str, str, str] = GATED
    """Hugging Face names of an expert's gate, up and down."""

    @property
    def text(self) -> str:
        """`*E` or `*-` and how often: attention and experts, or a dense feed-forward."""
        return f"{'*E' if self.experts else '*-'} x {self.num_layers}"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a checkpoint names what the config leaves open."""

    prefix: str = "model."
    head: bool = False
    """A tied model's file that holds `lm_head.weight` all the same."""

    def __post_init__(self) -> None:
        if (
            not isinstance(self.prefix, str)
            or not _PREFIX.fullmatch(self.prefix)
            or type(self.head) is not bool
        ):
            raise ValueError(f"no names of this family begin with {self.prefix!r}")


def base(f: Fields, **more: Any) -> Spec:
    """The fields that every GPT config has, under one spelling."""
    heads = f.size("num_attention_heads")
    hidden = f.size("hidden_size")
    groups = f.size("num_key_value_heads", default=heads)
    if heads % groups:
        f.refuse(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
    return Spec(
        num_layers=f.size("num_hidden_layers", most=10_000),
        hidden=hidden,
        vocab=f.size("vocab_size"),
        heads=heads,
        groups=groups,
        head_dim=f.size("head_dim", default=max(1, hidden // heads)),
        **({"ffn": f.size("intermediate_size")} | more),
    )


def spelling(spec: Spec, hf_names: Iterable[str]) -> Spelling:
    """How these names are spelled. Raises AccountingError where the prefix is unclear."""
    names = set(hf_names)
    tail = "embed_tokens.weight"
    prefixes = sorted(n.removesuffix(tail) for n in names if n.endswith(tail))
    if len(prefixes) != 1:
        raise AccountingError(
            "the layers' prefix is unclear",
            expected=f"one tensor whose name ends in `{tail}`",
            found=capped(prefixes or sorted(names), 4),
        )
    return Spelling(prefixes[0], spec.tied and "lm_head.weight" in names)


def mcore_spelling(spec: Spec, mcore_names: Iterable[str]) -> Spelling:
    """The published spelling."""
    return Spelling()


def rows(spec: Spec, spelling: Spelling, padded_vocab: int) -> Iterator[Row]:
    """The whole model, a row a Megatron parameter; all layers are alike, so `torch_dist` stacks them."""
    top, hidden, layers = spelling.prefix, spec.hidden, spec.num_layers
    yield embedding(f"{top}embed_tokens.weight", vocab=spec.vocab, padded=padded_vocab, hidden=hidden)
    parts = _layer(spec)
    for i in range(layers):
        for module, block in parts:
            yield from placed(block, f"decoder.layers.{i}.", f"{top}layers.{i}.{module}", i, layers)
    final = norm("decoder.final_layernorm.weight", f"{top}norm.weight", hidden)
    if spec.tied:  # the head has no weight of its own, but a module that saves its state
        final = replace(final, param=replace(final.param, memory_state="output_layer"))
    yield from placed([final], "", "", LAST)
    if not spec.tied:
        yield head("lm_head.weight", vocab=spec.vocab, padded=padded_vocab, hidden=hidden)


def copies(spec: Spec, spelling: Spelling) -> tuple[Copy, ...]:
    """Hugging Face tensors that repeat another."""
    if not spelling.head:
        return ()
    return (
        Copy("lm_head.weight", f"{spelling.prefix}embed_tokens.weight", "the head is tied to the embedding"),
    )


def _layer(spec: Spec) -> list[tuple[str, Block]]:
    """(Hugging Face module, its block) of one layer."""
    h = spec.hidden
    attn = attention(
        heads=spec.heads, groups=spec.groups, head_dim=spec.head_dim, hidden=h,
        qkv_bias=spec.qkv_bias, proj_bias=spec.proj_bias, qk_norm=spec.qk_norm,
    )  # fmt: skip
    qkv_norm = "self_attention.linear_qkv.layer_norm_weight"
    norms = [norm(qkv_norm, "input_layernorm.weight", h, "input_layernorm.weight")]
    if not spec.experts:
        norms += [
            norm(
                "mlp.linear_fc1.layer_norm_weight",
                "post_attention_layernorm.weight",
                h,
                "pre_mlp_layernorm.weight",
            )
        ]
        return [
            ("", norms),
            ("self_attn.", attn),
            ("mlp.", gated_mlp(hidden=h, ffn=spec.ffn, bias=spec.mlp_bias)),
        ]
    norms += [norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", h)]
    moe = router(experts=spec.experts, hidden=h, bias=False)
    moe += gated_experts(experts=spec.experts, width=h, ffn=spec.expert_ffn, names=spec.expert_names)
    return [("", norms), ("self_attn.", attn), (spec.moe_module, moe)]


def rope_theta(config: Config) -> float | None:
    """The base of the rotary embedding, as v4 (`rope_theta`) and v5 (`rope_parameters`) spell it."""
    nested = config.get("rope_parameters")
    value = config.get("rope_theta", nested.get("rope_theta") if isinstance(nested, dict) else None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def megatron_args(config: Config, spec: Spec, spelling: Spelling) -> dict[str, Any]:
    """The part of Megatron's `args` that config.json decides."""
    args: dict[str, Any] = {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden, "ffn_hidden_size": spec.ffn,
        "num_attention_heads": spec.heads, "num_query_groups": spec.groups, "kv_channels": spec.head_dim,
        "group_query_attention": spec.groups != spec.heads, "vocab_size": spec.vocab,
        "max_position_embeddings": config.get("max_position_embeddings"),
        "seq_length": config.get("max_position_embeddings"),
        "norm_epsilon": config.get("rms_norm_eps"), "layernorm_epsilon": config.get("rms_norm_eps"),
        "normalization": "RMSNorm", "swiglu": True, "squared_relu": False, "qk_layernorm": spec.qk_norm,
        "add_bias_linear": spec.mlp_bias, "add_qkv_bias": spec.qkv_bias,
        "position_embedding_type": "rope", "use_rotary_position_embeddings": True,
        "add_position_embedding": True, "rotary_base": rope_theta(config), "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": not spec.tied, "is_hybrid_model": False,
        "init_method_std": config.get("initializer_range"), "transformer_impl": "transformer_engine",
        "apply_layernorm_1p": False, "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }  # fmt: skip
    if spec.experts:
        args |= {
            "num_experts": spec.experts, "moe_ffn_hidden_size": spec.expert_ffn,
            "moe_router_topk": config.get("num_experts_per_tok"), "moe_layer_freq": 1,
            "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
            "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
        }  # fmt: skip
    return args


_SAME = (
    ("hidden_size", "hidden_size"),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "num_attention_heads"),
    ("num_key_value_heads", "num_query_groups"),
    ("head_dim", "kv_channels"),
    ("intermediate_size", "ffn_hidden_size"),
    ("vocab_size", "vocab_size"),
    ("max_position_embeddings", "max_position_embeddings"),
    ("rms_norm_eps", "norm_epsilon"),
    ("rope_theta", "rotary_base"),
)
"""(config.json, Megatron's args): the same value under two names."""

_ALSO = {
    "norm_epsilon": "layernorm_epsilon",
    "max_position_embeddings": "seq_length",
    "num_experts": "num_moe_experts",
}


def arg(args: Config, name: str) -> Any:
    """A value of Megatron's args, under its name there or in Megatron-Bridge's provider."""
    value = args.get(name)
    return args.get(_ALSO.get(name, name)) if value is None else value


def derived(args: Config, architecture: str, **more: Any) -> tuple[dict[str, Any], list[str]]:
    """(config.json of an architecture from Megatron's args, names of what could not be derived)."""
    untied = args.get("untie_embeddings_and_output_weights")
    shared = bool(args.get("share_embeddings_and_output_weights"))
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        **{hf: arg(args, mcore) for hf, mcore in _SAME},
        "tie_word_embeddings": shared if untied is None else not untied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32",
        **more,
    }
    missing = [name for name, value in config.items() if value is None]
    if args.get("rotary_scaling_factor") not in (None, 1.0) or args.get("use_rope_scaling"):
        missing.append("rope_scaling")
    return config, missing


def plain_gpt(args: Config) -> bool:
    """Whether args describe a rotary, RMS-normed, gated GPT without latent attention."""
    return (
        not (
            args.get("is_hybrid_model")
            or args.get("hybrid_layer_pattern")
            or args.get("multi_latent_attention")
        )
        and bool(args.get("swiglu") or args.get("gated_linear_unit"))
        and args.get("normalization") == "RMSNorm"
        and args.get("position_embedding_type") == "rope"
        and not args.get("mtp_num_layers")
        and not args.get("moe_shared_expert_intermediate_size")
        and not args.get("moe_router_enable_expert_bias")
    )
