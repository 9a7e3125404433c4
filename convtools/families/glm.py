"""GLM-4.5, 4.6 and Air: dense layers first, then MoE with shared experts; MTP past the last layer.

Hugging Face stores MTP depth i as layer `num_hidden_layers + i`, with copies of embedding and head;
transformers reads and writes the model without them.
"""

from typing import Any

from convtools.families.config import Config, Fields
from convtools.families.gpt import (
    Spec,
    Spelling,
    base,
    copies,
    derived,
    experts_of,
    mcore_spelling,
    megatron_args as gpt_args,
    mtp_depth_of,
    rows,
    spelling,
)  # fmt: skip
from convtools.families.gpt_args import expert_sizes, gated_rotary, routing_config, sigmoid_routing
from convtools.families.table import WIDER

__all__ = [
    "ARCHITECTURES", "NAME", "PROOF", "Spec", "Spelling",
    "copies", "hf_config", "mcore_spelling", "megatron_args", "parse", "rows", "spelling",
]  # fmt: skip

NAME = "glm"
PROOF = {
    "Glm4MoeForCausalLM": "rows written by hand, what transformers writes, and the logits of megatron-core's "
    "own model; no files of real Megatron",
}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)

_PARTIAL = 0.5
"""`partial_rotary_factor` where the config is silent, as in transformers."""


def parse(config: Config) -> Spec:
    """config.json -> Spec. Biases are on q, k, v and not on o. Raises ConfigError."""
    f = Fields(config)
    layers = f.size("num_hidden_layers", most=10_000)
    dense = f.size("first_k_dense_replace", default=1, least=0)
    expert_ffn = f.size("moe_intermediate_size")
    spec = base(
        f,
        tied=f.flag("tie_word_embeddings", default=False),
        qkv_bias=f.flag("attention_bias", default=False),
        qk_norm=f.flag("use_qk_norm", default=False),
        experts=experts_of(f),
        expert_ffn=expert_ffn,
        moe_layers=tuple(i >= dense for i in range(layers)),
        expert_bias=True,
        router_precision=WIDER,  # transformers keeps the router in fp32, the published files do not
        shared_ffn=expert_ffn * f.size("n_shared_experts", default=1, least=0, most=1_000),
        mtp_depth=mtp_depth_of(f),
    )
    f.done()
    return spec


def megatron_args(config: Config, spec: Spec, spelling: Spelling) -> dict[str, Any]:
    """The part of Megatron's `args` that config.json, and the MTP layers that have tensors, decide."""
    return (
        gpt_args(config, spec, spelling)
        | sigmoid_routing(config)
        | {
            "rotary_percent": _partial_rotary(config),
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": False,
            "mtp_num_layers": spec.mtp_depth if spec.mtp_depth and spelling.mtp else None,
        }
    )


def _partial_rotary(config: Config) -> Any:
    """`partial_rotary_factor`, as v4 (on its own) and v5 (in `rope_parameters`) spell it."""
    nested = config.get("rope_parameters")
    inner = nested.get("partial_rotary_factor") if isinstance(nested, dict) else None
    value = inner if config.get("partial_rotary_factor") is None else config["partial_rotary_factor"]
    return _PARTIAL if value is None else value


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args, what could not be derived)."""
    share = args.get("rotary_percent")
    if (
        not gated_rotary(args)
        or args.get("add_bias_linear")
        or args.get("moe_shared_expert_gate")
        or not args.get("moe_router_enable_expert_bias")
        or args.get("moe_router_score_function") != "sigmoid"
        or not isinstance(share, int | float)
        or not 0 < share < 1  # the rotary share is what tells GLM from others with this routing
    ):
        return {}, ["another architecture, by its args"]
    config, missing = derived(
        args, "Glm4MoeForCausalLM", **expert_sizes(args), **routing_config(args),
        attention_bias=bool(args.get("add_qkv_bias")), use_qk_norm=bool(args.get("qk_layernorm")),
        partial_rotary_factor=share,
    )  # fmt: skip
    return config | {"model_type": "glm4_moe"}, missing
