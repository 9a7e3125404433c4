"""DeepSeek-V3, R1, Kimi-K2: MLA, dense layers first, then MoE with shared experts, MTP past the last layer.

Hugging Face stores MTP depth i as layer `num_hidden_layers + i`, with copies of embedding and head;
transformers reads and writes the model without them. DeepSeek-V2 has no correction bias and no MTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from reprlib import repr  # a hostile value is long
from typing import Any

from convtools.families.blocks.mla import mla
from convtools.families.computed import check_activation, check_yarn, epsilon, refuse, scaling
from convtools.families.config import Config, Fields
from convtools.families.gpt import (
    Spec as GptSpec,
    Spelling,
    arg,
    check_size,
    copies,
    derived,
    experts_of,
    feed_forward,
    mcore_spelling,
    model,
    mtp_depth_of,
    rope_theta,
    spelling,
)  # fmt: skip
from convtools.families.gpt_args import expert_sizes, plain_layers, routing_config, sigmoid_routing
from convtools.families.table import WIDER, Block, Row, norm

__all__ = [
    "ARCHITECTURES", "NAME", "PROOF", "Spec", "Spelling",
    "copies", "hf_config", "mcore_spelling", "megatron_args", "parse", "rows", "spelling",
]  # fmt: skip

NAME = "deepseek"
PROOF = {
    "DeepseekV2ForCausalLM": "the same table as DeepSeek-V3 less the correction bias, and round trips",
    "DeepseekV3ForCausalLM": "files of real Megatron and Megatron-Bridge",
}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)

_YARN = (
    ("factor", "rotary_scaling_factor"),
    ("original_max_position_embeddings", "original_max_position_embeddings"),
    ("beta_fast", "beta_fast"),
    ("beta_slow", "beta_slow"),
    ("mscale", "mscale"),
    ("mscale_all_dim", "mscale_all_dim"),
)
"""(rope parameter of config.json, Megatron's name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(GptSpec):
    """What the config says."""

    q_rank: int
    kv_rank: int
    qk_nope: int
    qk_rope: int
    v_head_dim: int


def parse(config: Config) -> Spec:
    """config.json -> Spec. Raises ConfigError."""
    f = Fields(config)
    if f.flag("attention_bias", default=False):
        f.refuse("`attention_bias` is true: Megatron's latent attention has no such bias")
    v2 = f.get("architectures") == ["DeepseekV2ForCausalLM"]
    layers = f.size("num_hidden_layers", most=10_000)
    dense, freq = f.size("first_k_dense_replace", least=0), f.size("moe_layer_freq", default=1)
    heads, v_head_dim = f.size("num_attention_heads"), f.size("v_head_dim")
    expert_ffn = f.size("moe_intermediate_size")
    spec = Spec(
        num_layers=layers,
        hidden=f.size("hidden_size"),
        vocab=f.size("vocab_size"),
        tied=f.flag("tie_word_embeddings", default=False),
        heads=heads,
        groups=heads,
        head_dim=v_head_dim,
        q_rank=f.size("q_lora_rank", default=0, least=0),
        kv_rank=f.size("kv_lora_rank"),
        qk_nope=f.size("qk_nope_head_dim"),
        qk_rope=f.size("qk_rope_head_dim"),
        v_head_dim=v_head_dim,
        ffn=f.size("intermediate_size"),
        experts=experts_of(f),
        expert_ffn=expert_ffn,
        moe_layers=tuple(i >= dense and i % freq == 0 for i in range(layers)),
        expert_bias=not v2,
        router_precision=WIDER,  # transformers keeps the router in fp32, the published files do not
        shared_ffn=expert_ffn * f.size("n_shared_experts", default=0, least=0, most=1_000),
        mtp_depth=0 if v2 else mtp_depth_of(f),
    )
    if spec.tied:
        f.refuse("`tie_word_embeddings` is true: no published model has that")
    check_size(f, spec)
    f.done()
    return spec


def rows(spec: Spec, spelling: Spelling, padded_vocab: int) -> Iterator[Row]:
    """The whole model, a row a Megatron parameter."""
    return model(spec, spelling, padded_vocab, lambda moe: _layer(spec, spelling, moe))


def _layer(spec: Spec, spelling: Spelling, moe: bool) -> list[tuple[str, Block]]:
    """(Hugging Face module, its block) of one layer."""
    attn = mla(
        heads=spec.heads, hidden=spec.hidden, q_rank=spec.q_rank, kv_rank=spec.kv_rank,
        qk_nope=spec.qk_nope, qk_rope=spec.qk_rope, v_head_dim=spec.v_head_dim,
    )  # fmt: skip
    first = norm("input_layernorm.weight", "input_layernorm.weight", spec.hidden)
    second, module, block = feed_forward(spec, spelling, moe)
    return [("", [first, second]), ("self_attn.", attn), (module, block)]


def megatron_args(config: Config, spec: Spec, spelling: Spelling) -> dict[str, Any]:
    """The part of Megatron's `args` that config.json decides. Raises ConfigError for what has no word."""
    check_activation(config)
    if config.get("rope_interleave", True) is not True:
        raise refuse("`rope_interleave` is false, and Megatron's latent attention takes rotated pairs apart")
    routing = sigmoid_routing(config) if spec.expert_bias else _softmax_routing(config)
    return routing | _rope_args(config) | {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden, "ffn_hidden_size": spec.ffn,
        "num_attention_heads": spec.heads, "vocab_size": spec.vocab, "multi_latent_attention": True,
        "q_lora_rank": spec.q_rank or None, "kv_lora_rank": spec.kv_rank, "qk_head_dim": spec.qk_nope,
        "qk_pos_emb_head_dim": spec.qk_rope, "v_head_dim": spec.v_head_dim, "kv_channels": spec.v_head_dim,
        "qk_layernorm": True, "swiglu": True, "normalization": "RMSNorm",
        "norm_epsilon": epsilon(config), "layernorm_epsilon": epsilon(config),
        "attention_dropout": config.get("attention_dropout", 0.0), "hidden_dropout": 0.0,
        "init_method_std": config.get("initializer_range"),
        "position_embedding_type": "rope", "rotary_base": rope_theta(config),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "seq_length": config.get("max_position_embeddings"),
        "num_experts": spec.experts, "moe_ffn_hidden_size": spec.expert_ffn,
        "moe_layer_freq": [int(moe) for moe in spec.kinds],
        "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        "moe_router_topk": config.get("num_experts_per_tok"),
        "mtp_num_layers": spec.mtp_depth if spec.mtp_depth and spelling.mtp else None,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False, "add_qkv_bias": False, "is_hybrid_model": False, "moe_grouped_gemm": True,
        "transformer_impl": "transformer_engine",
    }  # fmt: skip


def _rope_args(config: Config) -> dict[str, Any]:
    """The rope in Megatron's words: plain, or YaRN with its six numbers. Raises ConfigError for others.

    Its defaults are of DeepSeek-V2, differ between versions, and scale the softmax of a plain rope too.
    """
    rope = scaling(config)
    if rope is None:
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        raise refuse("rope scaling other than `yarn`")
    check_yarn(rope)
    if not rope.get("truncate", True):
        raise refuse("`truncate` of YaRN is false, and Megatron's latent attention always rounds")
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        raise refuse("YaRN with `mscale_all_dim` and without `mscale`")
    length = config.get("max_position_embeddings")
    told = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": length} | {
        hf: rope[hf] for hf, _ in _YARN if rope.get(hf) is not None
    }
    if not rope.get("mscale_all_dim"):
        told |= {"mscale": 1.0, "mscale_all_dim": 0.0}  # transformers looks at neither alone
    return {"rope_type": "yarn"} | {mcore: told[hf] for hf, mcore in _YARN}


def _softmax_routing(config: Config) -> dict[str, Any]:
    """DeepSeek-V2's routing: weights that are scaled and not normed, of groups where there are several."""
    if config.get("norm_topk_prob"):
        raise refuse("`norm_topk_prob` is true, which transformers' DeepSeek-V2 does not look at")
    groups, method = config.get("n_group") or 1, config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise refuse(f"`topk_method` is {repr(method)}")
    limited = groups != 1 and method != "greedy"
    return {
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": config.get("topk_group") if limited else None,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
    }  # fmt: skip


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args, what could not be derived).

    Megatron-LM's args of many versions leave out some of YaRN's numbers, whose defaults in
    megatron-core need not be this model's: then they are named as missing.
    """
    if (
        not args.get("multi_latent_attention")
        or args.get("moe_router_score_function") != "sigmoid"
        or not args.get("moe_router_enable_expert_bias")
        or not plain_layers(args)
        or not args.get("untie_embeddings_and_output_weights", True)
    ):
        return {}, ["another architecture, by its args"]
    config, found = derived(
        args, "DeepseekV3ForCausalLM", **expert_sizes(args), **routing_config(args),
        num_key_value_heads=args.get("num_attention_heads"), kv_lora_rank=args.get("kv_lora_rank"),
        qk_nope_head_dim=args.get("qk_head_dim"), qk_rope_head_dim=args.get("qk_pos_emb_head_dim"),
        v_head_dim=args.get("v_head_dim"), attention_bias=False, moe_layer_freq=1,
        scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip
    config.pop("head_dim")
    missing = [name for name, value in config.items() if value is None]
    missing += [name for name in found if name not in (*config, "head_dim", "rope_scaling")]
    config |= {"model_type": "deepseek_v3", "q_lora_rank": args.get("q_lora_rank"), "rope_scaling": None}
    if (args.get("rope_type") or "yarn") == "yarn":
        yarn = {hf: arg(args, mcore) for hf, mcore in _YARN}
        config["rope_scaling"] = {"type": "yarn", "rope_type": "yarn"} | yarn
        missing += [f"rope_scaling.{name}" for name, value in yarn.items() if value is None]
    return config, missing
