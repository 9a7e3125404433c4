"""Llama 2, 3 and 3.x, and Mistral: GQA, gated feed-forward, no biases unless the config says so."""

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

NAME = "llama"
PROOF = {
    "LlamaForCausalLM": "files of real Megatron and Megatron-Bridge",
    "MistralForCausalLM": "the same table as Llama, and round trips",
}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)


def parse(config: Config) -> Spec:
    """config.json -> Spec. Raises ConfigError."""
    f = Fields(config)
    bias = f.flag("attention_bias", default=False)
    spec = base(
        f,
        tied=f.flag("tie_word_embeddings", default=False),
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=f.flag("mlp_bias", default=False),
    )
    f.done()
    return spec


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args, what could not be derived)."""
    if (
        not plain_gpt(args)
        or arg(args, "num_experts")
        or args.get("qk_layernorm")
        or args.get("add_qkv_bias")
    ):
        return {}, ["another architecture, by its args"]
    bias = bool(args.get("add_bias_linear"))
    return derived(args, "LlamaForCausalLM", attention_bias=bias, mlp_bias=bias)
