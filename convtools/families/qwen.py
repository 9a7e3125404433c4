"""Qwen2, Qwen2.5, Qwen3 (dense), Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B) and Qwen3-MoE."""

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
    megatron_args as gpt_args,
    plain_gpt,
    rows,
    spelling,
)  # fmt: skip
from convtools.families.gpt_args import moe_layers_of

__all__ = [
    "ARCHITECTURES", "NAME", "PROOF", "Spec", "Spelling",
    "copies", "hf_config", "mcore_spelling", "megatron_args", "parse", "rows", "spelling",
]  # fmt: skip

NAME = "qwen"
PROOF = {
    "Qwen2ForCausalLM": "files of real Megatron and Megatron-Bridge",
    "Qwen2MoeForCausalLM": "rows by hand, what transformers writes, and logits of megatron-core's own model",
    "Qwen3ForCausalLM": "parts of Qwen2 and Qwen3-MoE, and round trips",
    "Qwen3MoeForCausalLM": "files of real Megatron and Megatron-Bridge; with dense layers: logits of "
    "megatron-core's own model",
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
        moe: dict[str, Any] = {
            "experts": experts_of(f),
            "expert_ffn": f.size("moe_intermediate_size"),
            "moe_layers": _moe_layers(f),
        }
        if name == "Qwen2MoeForCausalLM":
            spec = base(
                f, tied=tied, qkv_bias=f.flag("qkv_bias", default=True), shared_gate=True,
                shared_ffn=f.size("shared_expert_intermediate_size"), shared_module="shared_expert.", **moe,
            )  # fmt: skip
        else:
            bias = f.flag("attention_bias", default=False)
            spec = base(f, tied=tied, qk_norm=True, qkv_bias=bias, proj_bias=bias, **moe)
    f.done()
    return spec


def _moe_layers(f: Fields) -> tuple[bool, ...] | None:
    """Every `decoder_sparse_step`-th layer has experts, but those in `mlp_only_layers`; None: all have."""
    layers = f.size("num_hidden_layers", most=10_000)
    step = f.size("decoder_sparse_step", default=1)
    dense = f.get("mlp_only_layers", default=[])
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        f.refuse(f"`mlp_only_layers` must list indices of the {layers} layers")
        return None
    only = set(dense)
    moe = tuple((i + 1) % step == 0 and i not in only for i in range(layers))
    return None if all(moe) else moe


def megatron_args(config: Config, spec: Spec, spelling: Spelling) -> dict[str, Any]:
    """The part of Megatron's `args` that config.json decides."""
    args = gpt_args(config, spec, spelling)
    if spec.experts:
        args["moe_router_pre_softmax"] = not config.get("norm_topk_prob")
    return args


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args, what could not be derived)."""
    experts, shared = arg(args, "num_experts"), args.get("moe_shared_expert_intermediate_size")
    norms, bias = bool(args.get("qk_layernorm")), bool(args.get("add_qkv_bias"))
    moe = moe_layers_of(args) if experts else ()
    plain = plain_gpt(dict(args) | {"moe_shared_expert_intermediate_size": None, "moe_layer_freq": 1})
    if (
        not plain
        or moe is None
        or args.get("add_bias_linear")
        or norms == bias
        or bool(shared) != bool(experts and bias)
        or bool(shared) != bool(args.get("moe_shared_expert_gate"))
    ):
        return {}, ["another architecture, by its args"]
    if not experts:
        if bias:
            return derived(args, "Qwen2ForCausalLM")
        return derived(args, "Qwen3ForCausalLM", attention_bias=False)
    name, own = (
        ("Qwen2MoeForCausalLM", {"qkv_bias": True, "shared_expert_intermediate_size": shared})
        if bias
        else ("Qwen3MoeForCausalLM", {"attention_bias": False})
    )
    config, missing = derived(
        args, name, **own, num_experts=experts,
        moe_intermediate_size=args.get("moe_ffn_hidden_size"),
        num_experts_per_tok=args.get("moe_router_topk"),
        decoder_sparse_step=1, mlp_only_layers=[i for i, x in enumerate(moe) if not x],
        norm_topk_prob=not args.get("moe_router_pre_softmax"),
    )  # fmt: skip
    return config | {"model_type": "qwen2_moe" if bias else "qwen3_moe"}, missing
