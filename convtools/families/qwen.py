"""Qwen2, Qwen2.5, Qwen3 (dense), and Qwen3-MoE."""

from typing import Any

from convtools.families.config import Config, Fields
from convtools.families.gpt import (
    Spec,
    Spelling,
    arg,
    base,
    copies,
    derived,
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

NAME = "qwen"
PROOF = {
    "Qwen2ForCausalLM": "files of real Megatron and Megatron-Bridge",
    "Qwen3ForCausalLM": "parts of Qwen2 and Qwen3-MoE, and round trips",
    "Qwen3MoeForCausalLM": "files of real Megatron and Megatron-Bridge",
}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)


def parse(config: Config) -> Spec:
    """config.json -> Spec. Qwen2 has biases on q, k, v; Qwen3 norms on q and k. Raises ConfigError."""
    f = Fields(config)
    name = str(f.get("architectures")[0])
    tied = f.flag("tie_word_embeddings", default=False)
    if name == "Qwen2ForCausalLM":
        spec = base(f, tied=tied, qkv_bias=True)
    elif name == "Qwen3ForCausalLM":
        bias = f.flag("attention_bias", default=False)
        spec = base(f, tied=tied, qk_norm=True, qkv_bias=bias, proj_bias=bias)
    else:
        bias = f.flag("attention_bias", default=False)
        if f.size("decoder_sparse_step", default=1) != 1 or f.get("mlp_only_layers", default=[]):
            f.refuse(
                "some layers are dense (`decoder_sparse_step`, `mlp_only_layers`): not in this table yet"
            )
        experts = f.size("num_experts", "num_local_experts", "n_routed_experts", most=65_536)
        spec = base(
            f, tied=tied, qk_norm=True, qkv_bias=bias, proj_bias=bias,
            experts=experts, expert_ffn=f.size("moe_intermediate_size"),
        )  # fmt: skip
    f.done()
    return spec


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args, what could not be derived)."""
    experts, norms, bias = (
        arg(args, "num_experts"),
        bool(args.get("qk_layernorm")),
        bool(args.get("add_qkv_bias")),
    )
    if not plain_gpt(args) or args.get("add_bias_linear") or norms == bias or (experts and not norms):
        return {}, ["another architecture, by its args"]
    if not norms:
        return derived(args, "Qwen2ForCausalLM")
    if not experts:
        return derived(args, "Qwen3ForCausalLM", attention_bias=False)
    config, missing = derived(
        args, "Qwen3MoeForCausalLM", attention_bias=False, num_experts=experts,
        moe_intermediate_size=args.get("moe_ffn_hidden_size"),
        num_experts_per_tok=args.get("moe_router_topk"),
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=not args.get("moe_router_pre_softmax"),
    )  # fmt: skip
    return config | {"model_type": "qwen3_moe"}, missing
