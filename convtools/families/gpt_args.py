"""A GPT's config in Megatron's words, and back."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from convtools.errors import ConfigError
from convtools.families.computed import (
    check_activation,
    check_biases,
    check_sigmoid_routing,
    epsilon,
    is_real,
    rope_args,
    window_args,
)
from convtools.families.config import Config

if TYPE_CHECKING:
    from convtools.families.gpt import Spec, Spelling


def rope_theta(config: Config) -> float:
    """The base of the rotary embedding, as v4 (`rope_theta`) and v5 (`rope_parameters`) spell it.

    Raises ConfigError where none is given, which Megatron would take for 10000, or layers differ in it (B13).
    """
    found = {x for x in _thetas(config) if is_real(x)}
    if len(found) == 1:
        return float(found.pop())
    raise ConfigError(
        "layers differ in their rotary base" if found else "the base of the rotary embedding is not given",
        where="config.json, `rope_theta` or `rope_parameters`",
        expected="one number for all layers: Megatron has one `rotary_base`",
        found=sorted(found) or None,
        fix=None if found else "add what the model was trained with: Llama 2, whose config has none, 10000",
    )


def _thetas(config: Config) -> Iterator[Any]:
    """Every base that is given; `rope_parameters` may hold one set of them for each type of layer."""
    yield config.get("rope_theta")
    nested = config.get("rope_parameters")
    for part in (nested, *nested.values()) if isinstance(nested, dict) else ():
        if isinstance(part, dict):
            yield part.get("rope_theta")


def megatron_args(config: Config, spec: "Spec", spelling: "Spelling") -> dict[str, Any]:
    """The part of Megatron's `args` that config.json decides. Raises ConfigError for what has no word."""
    check_activation(config)
    check_biases(spec)
    args: dict[str, Any] = {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden, "ffn_hidden_size": spec.ffn,
        "num_attention_heads": spec.heads, "num_query_groups": spec.groups, "kv_channels": spec.head_dim,
        "group_query_attention": spec.groups != spec.heads, "vocab_size": spec.vocab,
        "max_position_embeddings": config.get("max_position_embeddings"),
        "seq_length": config.get("max_position_embeddings"),
        "norm_epsilon": epsilon(config), "layernorm_epsilon": epsilon(config),
        "normalization": "RMSNorm", "swiglu": True, "squared_relu": False, "qk_layernorm": spec.qk_norm,
        "add_bias_linear": spec.mlp_bias, "add_qkv_bias": spec.qkv_bias,
        **rope_args(config), **window_args(config), "use_rotary_position_embeddings": True,
        "add_position_embedding": True, "rotary_base": rope_theta(config), "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": not spec.tied, "is_hybrid_model": False,
        "init_method_std": config.get("initializer_range"), "transformer_impl": "transformer_engine",
        "apply_layernorm_1p": False, "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }  # fmt: skip
    if spec.experts:
        args |= {
            "num_experts": spec.experts, "moe_ffn_hidden_size": spec.expert_ffn,
            "moe_router_topk": config.get("num_experts_per_tok"),
            "moe_layer_freq": 1 if spec.moe_layers is None else [int(moe) for moe in spec.moe_layers],
            "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": spec.expert_bias,
            "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
        }  # fmt: skip
    if spec.shared_ffn:
        args |= {
            "moe_shared_expert_intermediate_size": spec.shared_ffn,
            "moe_shared_expert_gate": spec.shared_gate,
        }
    return args


def sigmoid_routing(config: Config) -> dict[str, Any]:
    """DeepSeek-V3's routing in Megatron's words: sigmoid scores, corrected by a bias, limited to groups."""
    check_sigmoid_routing(config)
    groups = config.get("n_group") or 1
    return {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if groups != 1 else None,
        "moe_router_group_topk": config.get("topk_group") if groups != 1 else None,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
    }  # fmt: skip


def routing_config(args: Config) -> dict[str, Any]:
    """The same in config.json's words."""
    scale = args.get("moe_router_topk_scaling_factor")
    return {
        "n_group": args.get("moe_router_num_groups") or 1,
        "topk_group": args.get("moe_router_group_topk") or 1,
        "routed_scaling_factor": 1.0 if scale is None else scale,
        "num_experts_per_tok": args.get("moe_router_topk"),
        "norm_topk_prob": args.get("moe_router_topk") != 1,
    }


def expert_sizes(args: Config) -> dict[str, Any]:
    """Sizes of routed and shared experts as DeepSeek and GLM spell them; None for what they cannot say."""
    moe, ffn, shared = (
        moe_layers_of(args),
        args.get("moe_ffn_hidden_size"),
        args.get("moe_shared_expert_intermediate_size") or 0,
    )
    width = ffn if type(ffn) is int and ffn > 0 and type(shared) is int else 0
    dense = moe.index(True) if moe and True in moe else None
    return {
        "first_k_dense_replace": dense if moe and dense is not None and all(moe[dense:]) else None,
        "n_routed_experts": arg(args, "num_experts"),
        "moe_intermediate_size": ffn,
        "n_shared_experts": shared // width if width and shared % width == 0 else None,
        "num_nextn_predict_layers": args.get("mtp_num_layers") or 0,
    }


def moe_layers_of(args: Config) -> tuple[bool, ...] | None:
    """Which layers have experts, by `moe_layer_freq`: every n-th, or a list. None where neither can be."""
    freq, layers = args.get("moe_layer_freq", 1), args.get("num_layers")
    if type(layers) is not int or not 0 < layers <= 10_000:
        return None
    if type(freq) is int and freq > 0:
        return tuple(i % freq == 0 for i in range(layers))
    if isinstance(freq, list | tuple) and len(freq) == layers and all(x in (0, 1) for x in freq):
        return tuple(bool(x) for x in freq)
    return None


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
    if args.get("window_size") is not None and "sliding_window" not in config:
        missing.append("sliding_window")
    return config, missing + [f"{name}={args[name]!r:.40}" for name in _SPECIAL if args.get(name)]


_SPECIAL = (
    "rotary_seq_len_interpolation_factor", "apply_residual_connection_post_layernorm", "qk_l2_norm",
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "no_rope_freq",
    "moe_latent_size", "moe_apply_probs_on_input",
)  # fmt: skip
"""What no config.json of these families can say, where args hold it."""

_CENTRED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")


def plain_layers(args: Config) -> bool:
    """Whether norms are stored whole, and neither softmax, attention nor gate has anything added."""
    return (
        not any(args.get(name) for name in (*_CENTRED, "attention_output_gate", "glu_linear_offset"))
        and args.get("softmax_type") in (None, "vanilla")
        and args.get("activation_func_clamp_value") is None
    )


def plain_gpt(args: Config) -> bool:
    """Whether args describe a rotary, RMS-normed, gated GPT with nothing special about it."""
    experts = arg(args, "num_experts")
    return (
        gated_rotary(args)
        and args.get("moe_router_score_function") in (None, "softmax")
        and not args.get("moe_router_num_groups")
        and args.get("moe_router_topk_scaling_factor") in (None, 1, 1.0)
        and args.get("rotary_percent") in (None, 1, 1.0)
        and not args.get("mtp_num_layers")
        and not args.get("moe_shared_expert_intermediate_size")
        and not args.get("moe_router_enable_expert_bias")
        and (not experts or all(moe_layers_of(args) or (False,)))
    )


def gated_rotary(args: Config) -> bool:
    """Whether args describe a rotary, RMS-normed, gated GPT without latent attention."""
    return (
        not (
            args.get("is_hybrid_model")
            or args.get("hybrid_layer_pattern")
            or args.get("multi_latent_attention")
            or args.get("experimental_attention_variant")
        )
        and plain_layers(args)
        and bool(args.get("swiglu") or args.get("gated_linear_unit"))
        and args.get("normalization") == "RMSNorm"
        and args.get("position_embedding_type") == "rope"
    )
