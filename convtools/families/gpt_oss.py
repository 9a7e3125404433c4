"""GPT-OSS: attention sinks, biases everywhere, fused experts stored transposed and interleaved.

Only the bf16 form is in the table; the published MXFP4 blocks are refused before it is asked.
Megatron itself runs experts with biases at etp 1 only ("Bias in Moe is only supported when ETP==1").
"""

from collections.abc import Iterator
from typing import Any

from convtools.families.blocks.attention import attention
from convtools.families.blocks.interleaved_experts import biased_router, interleaved_experts
from convtools.families.config import Config, Fields
from convtools.families.gpt import (
    Spec,
    Spelling,
    arg,
    base,
    copies,
    derived,
    experts_of,
    mcore_spelling,
    megatron_args as gpt_args,
    model,
    rope_theta,
    spelling,
)  # fmt: skip
from convtools.families.table import Block, Row, norm

__all__ = [
    "ARCHITECTURES", "NAME", "PROOF", "Spec", "Spelling",
    "copies", "hf_config", "mcore_spelling", "megatron_args", "parse", "rows", "spelling",
]  # fmt: skip

NAME = "gpt_oss"
PROOF = {
    "GptOssForCausalLM": "files of real Megatron and Megatron-Bridge (one rank), what megatron-core builds "
    "at tp, pp and ep, what transformers writes and computes, and rows written by hand",
}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)

_KINDS = ("sliding_attention", "full_attention")
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""What transformers takes where the config is silent."""
_SLIDING_WINDOW, _SWIGLU_LIMIT, _SWIGLU_ALPHA, _TOPK = 128, 7.0, 1.702, 4
_FROM_YARN = (
    ("factor", "yarn_rotary_scaling_factor"),
    ("original_max_position_embeddings", "yarn_original_max_position_embeddings"),
    ("beta_fast", "yarn_beta_fast"),
    ("beta_slow", "yarn_beta_slow"),
    ("truncate", "yarn_correction_range_round_to_int"),
)
"""(rope parameter of config.json, Megatron's name)."""


def parse(config: Config) -> Spec:
    """config.json -> Spec. Raises ConfigError, also for what Megatron's GPT-OSS cannot compute."""
    f = Fields(config)
    if not f.flag("attention_bias", default=True):
        f.refuse("attention_bias=false: Megatron's layers have biases in all linear layers or in none")
    alpha = f.get("swiglu_alpha", default=_SWIGLU_ALPHA)
    if alpha != _SWIGLU_ALPHA:
        f.refuse(f"swiglu_alpha={alpha!r:.40}: Megatron's quick GELU has {_SWIGLU_ALPHA} built in")
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type", "default")) not in ("default", "yarn"):
        f.refuse("rope scaling other than `yarn` or none")
    ffn = f.size("intermediate_size")
    spec = base(
        f, tied=f.flag("tie_word_embeddings", default=False), qkv_bias=True, proj_bias=True, mlp_bias=True,
        experts=experts_of(f), ffn=ffn, expert_ffn=ffn,
    )  # fmt: skip
    kinds = config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != spec.num_layers or any(k not in _KINDS for k in kinds)
    ):
        f.refuse(f"`layer_types` must name {' or '.join(_KINDS)} for each of {spec.num_layers} layers")
    f.done()
    return spec


def rows(spec: Spec, spelling: Spelling, padded_vocab: int) -> Iterator[Row]:
    """The whole model, a row a Megatron parameter; all layers are alike, so `torch_dist` stacks them."""
    return model(spec, spelling, padded_vocab, lambda moe: _layer(spec))


def _layer(spec: Spec) -> list[tuple[str, Block]]:
    h, qkv_norm = spec.hidden, "self_attention.linear_qkv.layer_norm_weight"
    fc1_norm = "mlp.linear_fc1.layer_norm_weight"
    attn = attention(
        heads=spec.heads, groups=spec.groups, head_dim=spec.head_dim, hidden=h,
        qkv_bias=True, proj_bias=True, sinks=True,
    )  # fmt: skip
    norms = [
        norm(qkv_norm, "input_layernorm.weight", h, "input_layernorm.weight"),
        # The local spec names the second norm in `torch_dist` as if its layer were dense.
        norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", h, fc1_norm),
    ]
    moe = biased_router(experts=spec.experts, hidden=h)
    moe += interleaved_experts(experts=spec.experts, width=h, ffn=spec.expert_ffn)
    return [("", norms), ("self_attn.", attn), ("mlp.", moe)]


def _rope(config: Config) -> dict[str, Any]:
    """The rope parameters, as transformers 5 (`rope_parameters`) or 4 (`rope_scaling`) spells them."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    return given if isinstance(given, dict) else _YARN


def _windows(config: Config, num_layers: int) -> dict[str, Any]:
    """Sliding windows as Megatron counts them: tokens before a token's own, and which layers have one."""
    size = config.get("sliding_window", _SLIDING_WINDOW)
    kinds = config.get("layer_types") or [_KINDS[i % 2] for i in range(num_layers)]
    slides = [int(kind == _KINDS[0]) for kind in kinds]
    if not isinstance(size, int) or size < 1 or not any(slides):
        return {"window_size": None, "window_attn_skip_freq": None}
    every = slides.index(0) + 1 if 0 in slides else None
    regular = every is None or slides == [int((i + 1) % every != 0) for i in range(num_layers)]
    return {"window_size": [size - 1, 0], "window_attn_skip_freq": every if regular else slides}


def megatron_args(config: Config, spec: Spec, spelling: Spelling) -> dict[str, Any]:
    """The part of Megatron's `args` that config.json decides."""
    rope = _rope(config)
    yarn = rope.get("rope_type", rope.get("type")) == "yarn"
    args = gpt_args(config, spec, spelling) | {
        "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.get("swiglu_limit", _SWIGLU_LIMIT),
        "add_bias_linear": True, "add_qkv_bias": False, "softmax_type": "learnable",
        "rotary_base": rope_theta(config),
        "position_embedding_type": "yarn" if yarn else "rope",
        "moe_router_topk": config.get("num_experts_per_tok", config.get("experts_per_token", _TOPK)),
        "moe_router_pre_softmax": False, "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef"),
        **_windows(config, spec.num_layers),
    }  # fmt: skip
    if yarn:
        args |= {mcore: rope.get(hf, _YARN[hf]) for hf, mcore in _FROM_YARN if hf != "truncate"}
        # Transformers rounds the correction range unless told not to.
        args["yarn_correction_range_round_to_int"] = rope.get("truncate", True)
        args |= {f"yarn_{name}": rope.get(name) for name in ("mscale", "mscale_all_dim")}
    return args


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args, what could not be derived)."""
    experts = arg(args, "num_experts")
    if not (
        args.get("softmax_type") == "learnable"
        and args.get("position_embedding_type") == "yarn"
        and args.get("normalization") == "RMSNorm"
        and args.get("glu_linear_offset") == 1.0
        and args.get("add_bias_linear")
        and experts
        and not args.get("qk_layernorm")
        and not args.get("moe_shared_expert_intermediate_size")
    ):
        return {}, ["another architecture, by its args"]
    rope = {"rope_type": "yarn"} | {hf: args.get(mcore) for hf, mcore in _FROM_YARN}
    config, missing = derived(
        args, "GptOssForCausalLM", num_local_experts=experts, num_experts_per_tok=args.get("moe_router_topk"),
        attention_bias=True, swiglu_limit=args.get("activation_func_clamp_value"), rope_scaling=rope,
        sliding_window=_sliding_window(args), layer_types=_layer_types(args),
    )  # fmt: skip
    config |= {"model_type": "gpt_oss", "intermediate_size": args.get("moe_ffn_hidden_size")}
    missing += [f"rope_scaling.{name}" for name, value in rope.items() if value is None]
    if config["intermediate_size"] is None:
        missing.append("intermediate_size")
    if args.get("yarn_mscale") is not None or args.get("yarn_mscale_all_dim") is not None:
        missing.append("rope_scaling: its mscale is not the usual one")
    return config, missing


def _sliding_window(args: Config) -> int | None:
    window = args.get("window_size")
    before = window[0] if isinstance(window, list | tuple) and len(window) == 2 else None
    return before + 1 if isinstance(before, int) and before >= 0 else None


def _layer_types(args: Config) -> list[str] | None:
    """`window_attn_skip_freq` N: every Nth layer attends fully; a list: 1 where it slides."""
    layers, every = args.get("num_layers"), args.get("window_attn_skip_freq")
    if not isinstance(layers, int) or not 0 < layers <= 10_000:
        return None
    if isinstance(every, list | tuple):
        return [_KINDS[0] if slides else _KINDS[1] for slides in every] if len(every) == layers else None
    if every is None:
        return [_KINDS[0]] * layers
    return [_KINDS[(i + 1) % every == 0] for i in range(layers)] if isinstance(every, int) and every else None
