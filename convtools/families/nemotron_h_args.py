"""Nemotron-H's config in Megatron's words, and back."""

from reprlib import repr  # a hostile value is long
from typing import TYPE_CHECKING, Any

from convtools.families.computed import check_sigmoid_routing, refuse
from convtools.families.config import Config

if TYPE_CHECKING:
    from convtools.families.nemotron_h import Spec, Spelling

_SAME = (
    ("hidden_size", "hidden_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("num_key_value_heads", "num_query_groups"),
    ("head_dim", "kv_channels"),
    ("intermediate_size", "ffn_hidden_size"),
    ("max_position_embeddings", "max_position_embeddings"),
    ("layer_norm_epsilon", "norm_epsilon"),
    ("residual_in_fp32", "fp32_residual_connection"),
    ("attention_dropout", "attention_dropout"),
    ("hidden_dropout", "hidden_dropout"),
    ("initializer_range", "init_method_std"),
    ("mamba_num_heads", "mamba_num_heads"),
    ("mamba_head_dim", "mamba_head_dim"),
    ("n_groups", "mamba_num_groups"),
    ("ssm_state_size", "mamba_state_dim"),
    ("chunk_size", "mamba_chunk_size"),
    ("n_routed_experts", "num_experts"),
    ("num_experts_per_tok", "moe_router_topk"),
    ("moe_intermediate_size", "moe_ffn_hidden_size"),
    ("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ("moe_shared_expert_overlap", "moe_shared_expert_overlap"),
    ("moe_latent_size", "moe_latent_size"),
    ("n_group", "moe_router_num_groups"),
    ("topk_group", "moe_router_group_topk"),
    ("routed_scaling_factor", "moe_router_topk_scaling_factor"),
    ("num_nextn_predict_layers", "mtp_num_layers"),
)
"""(config.json, Megatron's args): the same value under two names."""

_ALSO = {
    "head_dim": ("attention_head_dim",),
    "norm_epsilon": ("layernorm_epsilon",),
    "num_experts": ("num_moe_experts",),
    "max_position_embeddings": ("seq_length",),
}
"""Other names of either side."""

_CONSTANT = {
    "normalization": "RMSNorm", "position_embedding_type": "none", "squared_relu": True, "swiglu": False,
    "add_bias_linear": False, "is_hybrid_model": True, "group_query_attention": True,
    "transformer_impl": "transformer_engine", "bf16": True, "fp16": False,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4, "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall", "apply_layernorm_1p": False, "rotary_percent": 1.0,
    "add_position_embedding": True, "use_rotary_position_embeddings": False,
    "apply_query_key_layer_scaling": False, "rotary_interleaved": False,
    "moe_router_pre_softmax": False, "moe_layer_freq": 1,
}  # fmt: skip
"""What Megatron must be told of every Nemotron-H model."""

_FIXED = {k: _CONSTANT[k] for k in ("normalization", "position_embedding_type", "squared_relu", "swiglu")} | {
    "add_bias_linear": False, "apply_layernorm_1p": False, "layernorm_zero_centered_gamma": False,
    "moe_router_score_function": "sigmoid",
}  # fmt: skip
"""Of these, what args may not contradict."""

_DERIVED = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "norm_topk_prob": True,
    "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "use_conv_bias": True, "use_bias": False,
    "mlp_bias": False, "mamba_proj_bias": False, "time_step_limit": [0.0, float("inf")],
}  # fmt: skip
"""What Megatron's code fixes and config.json spells out."""


def _first(config: Config, name: str) -> Any:
    return next((config[n] for n in (name, *_ALSO.get(name, ())) if config.get(n) is not None), None)


def _biases(spec: "Spec") -> set[bool]:
    """Whether the linear layers of attention, feed-forward and experts have biases."""
    kinds = {"*": spec.attention_bias, "-": spec.mlp_bias, "E": False}
    return {kinds[kind] for kind in set(spec.text) & set(kinds)}


def _check(config: Config, spec: "Spec") -> None:
    """Raise ConfigError for what Megatron's hybrid layers do not compute."""
    for name, known in (("mlp_hidden_act", ("relu2",)), ("mamba_hidden_act", ("silu", "swish"))):
        if config.get(name) not in (None, *known):
            raise refuse(f"`{name}` is {repr(config[name])}, expected {known[0]}")
    if len(_biases(spec)) > 1:  # a loader of `torch_dist` passes over those that its model has not
        raise refuse("`attention_bias` and `mlp_bias` differ, and its hybrid layers all have biases or none")
    if "E" in spec.text:
        check_sigmoid_routing(config)


def megatron_args(config: Config, spec: "Spec", spelling: "Spelling") -> dict[str, Any]:
    """The part of Megatron's `args` that config.json, and the depths that have weights, decide."""
    _check(config, spec)
    # A config that is silent about it may still have weights for one depth only.
    repeated = bool(spec.mtp_repeated) or (spec.mtp_depth > 1 and spelling.mtp_layers == 1)
    args = dict(_CONSTANT)
    args |= {mcore: _first(config, hf) for hf, mcore in _SAME}
    args |= {
        "num_layers": spec.num_layers,
        "vocab_size": spec.vocab,
        "kv_channels": spec.head_dim or args["kv_channels"],
        "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        "seq_length": args["max_position_embeddings"],
        "layernorm_epsilon": args["norm_epsilon"],
        "hybrid_layer_pattern": spec.text,
        "hybrid_override_pattern": None,
        "mtp_hybrid_override_pattern": spec.mtp_pattern or None,
        "mtp_num_layers": spec.mtp_depth or None,
        "mtp_use_repeated_layer": repeated,
        "add_bias_linear": True in _biases(spec),
        "add_qkv_bias": spec.attention_bias,
        "untie_embeddings_and_output_weights": not spec.tied,
    }
    return args


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args and tensors' shapes, names of what could not be derived)."""
    text = str(args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern") or "").replace("|", "")
    pattern, *mtp = text.split("/")
    mtp_pattern = mtp[0] if mtp else args.get("mtp_hybrid_override_pattern") or ""
    config = dict(_DERIVED)
    config |= {hf: value for hf, mcore in _SAME if (value := _first(args, mcore)) is not None}
    depth = args.get("mtp_num_layers") or len(mtp)
    tied = args.get("untie_embeddings_and_output_weights")
    conv = next(
        (s for n, s in sorted(shapes.items()) if n.endswith((".conv1d.weight.x", ".conv1d.weight"))), None
    )
    conv = conv or next((s for n, s in sorted(shapes.items()) if n.endswith(".conv1d_weight")), None)
    config |= {
        "vocab_size": args.get("vocab_size"),
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern or None,
        "tie_word_embeddings": bool(args.get("share_embeddings_and_output_weights"))
        if tied is None
        else not tied,
        "attention_bias": bool(args.get("add_qkv_bias")),
        "num_nextn_predict_layers": depth,
        "n_shared_experts": 1 if config.get("moe_shared_expert_intermediate_size") else 0,
        "torch_dtype": "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32",
    }
    if depth:
        config |= {"mtp_hybrid_override_pattern": mtp_pattern or None}
        if not isinstance(depth, int) or depth > 1:
            config["mtp_use_repeated_layer"] = bool(args.get("mtp_use_repeated_layer"))
    wrong = [f"{k}={args[k]!r}, expected {v!r}" for k, v in _FIXED.items() if args.get(k) not in (None, v)]
    needed = [
        "vocab_size",
        "hidden_size",
        "hybrid_override_pattern",
        "layer_norm_epsilon",
        "max_position_embeddings",
    ]
    if "M" in pattern:
        config["conv_kernel"] = conv[-1] if conv else None
        needed += ["conv_kernel", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"]
    if "*" in pattern:
        needed += ["num_attention_heads", "num_key_value_heads", "head_dim"]
    if "-" in pattern:
        needed += ["intermediate_size"]
    if "E" in pattern:
        needed += [
            "n_routed_experts",
            "moe_intermediate_size",
            "num_experts_per_tok",
            "routed_scaling_factor",
        ]
    if depth:
        needed += ["mtp_hybrid_override_pattern"]
    if args.get("num_layers") not in (None, len(pattern)):
        wrong.append(f"num_layers={args['num_layers']!r}, but the pattern has {len(pattern)}")
    return config, wrong + [name for name in needed if config.get(name) is None]
