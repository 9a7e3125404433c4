"""The config of Qwen3-Next and Qwen3.5 in Megatron's words, and back."""

from typing import TYPE_CHECKING, Any

from convtools.families.computed import check_activation, epsilon, rope_args
from convtools.families.config import Config
from convtools.families.gpt_args import arg, derived, rope_theta

if TYPE_CHECKING:
    from convtools.families.qwen_next import Spec, Spelling

_GDN = "gated_delta_net"
_LINEAR = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip
"""What both sides call by one name."""


def _rotary_percent(config: Config) -> Any:
    """How much of a head is rotated, as v4 (`partial_rotary_factor`) and v5 (`rope_parameters`) spell it."""
    nested = config.get("rope_parameters")
    inner = nested.get("partial_rotary_factor") if isinstance(nested, dict) else None
    value = config.get("partial_rotary_factor", inner)
    return 0.25 if value is None else value


def megatron_args(config: Config, spec: "Spec", spelling: "Spelling") -> dict[str, Any]:
    """The part of Megatron's `args` that config.json, and whether there is an MTP layer, decide."""
    check_activation(config)
    args: dict[str, Any] = {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden,
        "ffn_hidden_size": spec.ffn or spec.expert_ffn,
        "num_attention_heads": spec.heads, "num_query_groups": spec.groups, "kv_channels": spec.head_dim,
        "group_query_attention": spec.groups != spec.heads, "vocab_size": spec.vocab,
        "max_position_embeddings": config.get("max_position_embeddings"),
        "seq_length": config.get("max_position_embeddings"),
        "norm_epsilon": epsilon(config), "layernorm_epsilon": epsilon(config),
        "normalization": "RMSNorm", "apply_layernorm_1p": True, "layernorm_zero_centered_gamma": True,
        "swiglu": True, "squared_relu": False, "qk_layernorm": True, "attention_output_gate": True,
        "experimental_attention_variant": _GDN, "linear_attention_freq": [int(x) for x in spec.linear],
        "linear_conv_kernel_dim": spec.conv_kernel, "linear_key_head_dim": spec.key_dim,
        "linear_value_head_dim": spec.value_dim, "linear_num_key_heads": spec.key_heads,
        "linear_num_value_heads": spec.value_heads,
        "add_bias_linear": False, "add_qkv_bias": False,
        **rope_args(config), "use_rotary_position_embeddings": True,
        "add_position_embedding": True, "rotary_base": rope_theta(config),
        "rotary_percent": _rotary_percent(config),
        "untie_embeddings_and_output_weights": not spec.tied, "is_hybrid_model": False,
        "init_method_std": config.get("initializer_range"), "transformer_impl": "transformer_engine",
        "attention_dropout": config.get("attention_dropout", 0.0), "hidden_dropout": 0.0,
        "mtp_num_layers": 1 if spelling.mtp else None,
    }  # fmt: skip
    if spec.experts:
        args |= {
            "num_experts": spec.experts, "moe_ffn_hidden_size": spec.expert_ffn,
            "moe_layer_freq": 1 if all(spec.sparse) else [int(x) for x in spec.sparse],
            "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
            "moe_shared_expert_gate": bool(spec.shared_ffn),
            "moe_router_topk": config.get("num_experts_per_tok"), "moe_router_score_function": "softmax",
            # Qwen3.5's code norms the weights whatever its config says.
            "moe_router_pre_softmax": spec.by_key_head and config.get("norm_topk_prob") is False,
            "moe_router_enable_expert_bias": False, "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
        }  # fmt: skip
    return args


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args, what could not be derived).

    Args do not tell Qwen3-Next from the text model of Qwen3.5, which computes the same from other
    tensors' names: with experts the former is derived, without them the latter.
    """
    if args.get("experimental_attention_variant") != _GDN or args.get("multi_latent_attention"):
        return {}, ["another architecture, by its args"]
    experts, n = arg(args, "num_experts"), args.get("num_layers")
    more: dict[str, Any] = {name: args.get(name) for name in _LINEAR}
    more |= {
        "layer_types": _layer_types(args.get("linear_attention_freq"), n),
        "partial_rotary_factor": args.get("rotary_percent"),
        "attention_bias": False,
    }
    name, model_type = "Qwen3_5ForCausalLM", "qwen3_5_text"
    if experts:
        name, model_type = "Qwen3NextForCausalLM", "qwen3_next"
        shared = args.get("moe_shared_expert_intermediate_size")
        more |= {
            "num_experts": experts, "moe_intermediate_size": args.get("moe_ffn_hidden_size"),
            "num_experts_per_tok": args.get("moe_router_topk"),
            "shared_expert_intermediate_size": shared or 0, "decoder_sparse_step": 1,
            "mlp_only_layers": _dense_layers(args.get("moe_layer_freq"), n),
            "norm_topk_prob": not args.get("moe_router_pre_softmax"),
        }  # fmt: skip
    config, missing = derived(args, name, **more)
    wrong = [
        f"{key}={args[key]!r}"
        for key, expected in (
            ("attention_output_gate", True), ("position_embedding_type", "rope"), ("qk_layernorm", True),
            ("add_bias_linear", False), ("normalization", "RMSNorm"), ("softmax_type", "vanilla"),
            ("glu_linear_offset", 0), ("activation_func_clamp_value", None),
            ("moe_router_score_function", "softmax"), ("moe_router_enable_expert_bias", False),
            ("moe_router_topk_scaling_factor", 1), ("moe_router_num_groups", None),
        )
        if args.get(key) not in (None, expected)
    ]  # fmt: skip
    centred = [args.get(key) for key in ("apply_layernorm_1p", "layernorm_zero_centered_gamma")]
    if not any(centred) and any(x is not None for x in centred):
        wrong.append("apply_layernorm_1p")
    if experts and bool(more["shared_expert_intermediate_size"]) != bool(args.get("moe_shared_expert_gate")):
        wrong.append("moe_shared_expert_gate")
    return config | {"model_type": model_type}, missing + wrong


def _layer_types(freq: Any, n: Any) -> list[str] | None:
    """A list of ones for linear attention, or every so many layers one of softmax attention."""
    if type(freq) is int and type(n) is int and freq > 0 and 0 < n <= 10_000:
        freq = [int((i + 1) % freq != 0) for i in range(n)]
    if not isinstance(freq, list) or len(freq) != n or any(x not in (0, 1) for x in freq):
        return None
    return ["linear_attention" if x else "full_attention" for x in freq]


def _dense_layers(freq: Any, n: Any) -> list[int] | None:
    """A list of ones for experts, or every so many layers, from the first on, one of experts."""
    if freq in (None, 1):
        return []
    if type(freq) is int and type(n) is int and freq > 0 and 0 < n <= 10_000:
        freq = [int(i % freq == 0) for i in range(n)]
    if not isinstance(freq, list) or len(freq) != n or any(x not in (0, 1) for x in freq):
        return None
    return [i for i, x in enumerate(freq) if not x]
