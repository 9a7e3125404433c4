"""Mixtral: GQA, and experts in every layer, named w1 (gate), w3 (up), w2 (down).

Fused experts (transformers' `save_original_format=False`) and their router are in `mlp` instead.
"""

from typing import Any

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
    megatron_args,
    plain_gpt,
    rows,
    spelling,
)  # fmt: skip

__all__ = [
    "ARCHITECTURES", "NAME", "PROOF", "Spec", "Spelling",
    "copies", "hf_config", "mcore_spelling", "megatron_args", "parse", "rows", "spelling",
]  # fmt: skip

NAME = "mixtral"
PROOF = {
    "MixtralForCausalLM": "rows written by hand, round trips, and the logits of megatron-core's own model",
}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)


def parse(config: Config) -> Spec:
    """config.json -> Spec. Raises ConfigError."""
    f = Fields(config)
    spec = base(
        f,
        tied=f.flag("tie_word_embeddings", default=False),
        experts=experts_of(f),
        expert_ffn=f.size("intermediate_size"),
        moe_module="block_sparse_moe.",
        expert_names=("w1", "w3", "w2"),
    )
    f.done()
    return spec


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args, what could not be derived)."""
    experts = arg(args, "num_experts")
    if (
        not plain_gpt(args)
        or not experts
        or args.get("qk_layernorm")
        or args.get("add_qkv_bias")
        or args.get("moe_router_pre_softmax")
    ):
        return {}, ["another architecture, by its args"]
    config, missing = derived(
        args, "MixtralForCausalLM", num_local_experts=experts, num_experts_per_tok=args.get("moe_router_topk")
    )
    return config | {"intermediate_size": args.get("moe_ffn_hidden_size")}, missing
