"""Architectures of which no files of real Megatron exist here: there and back, and which half is the gate."""

from pathlib import Path
from typing import Any

import pytest

import convtools
from tests.nemotron_checkpoints import Tensors, write_hf
from tests.tensors import differences, read_hf, read_rank

BASE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 10, "vocab_size": 23, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 14, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 5e5,
}  # fmt: skip


def inventory(config: dict[str, Any]) -> Tensors:
    """Every tensor of a tiny model, by hand."""
    name, out = (
        config["architectures"][0],
        {"model.embed_tokens.weight": (23, 10), "model.norm.weight": (10,)},
    )
    for i in range(2):
        at = f"model.layers.{i}."
        out |= {f"{at}input_layernorm.weight": (10,), f"{at}post_attention_layernorm.weight": (10,)}
        for x, rows in (("q", 24), ("k", 12), ("v", 12)):
            out[f"{at}self_attn.{x}_proj.weight"] = (rows, 10)
            if config.get("attention_bias"):
                out[f"{at}self_attn.{x}_proj.bias"] = (rows,)
        out[f"{at}self_attn.o_proj.weight"] = (10, 24)
        if config.get("attention_bias"):
            out[f"{at}self_attn.o_proj.bias"] = (10,)
        if name == "Qwen3ForCausalLM":
            out |= {f"{at}self_attn.{x}_norm.weight": (6,) for x in "qk"}
        if name == "MixtralForCausalLM":
            out[f"{at}block_sparse_moe.gate.weight"] = (4, 10)
            for e in range(4):
                expert = f"{at}block_sparse_moe.experts.{e}."
                out |= {
                    f"{expert}w1.weight": (14, 10),
                    f"{expert}w2.weight": (10, 14),
                    f"{expert}w3.weight": (14, 10),
                }
        else:
            out |= {f"{at}mlp.{x}_proj.weight": (14, 10) for x in ("gate", "up")}
            out[f"{at}mlp.down_proj.weight"] = (10, 14)
        if config.get("mlp_bias"):
            out |= {f"{at}mlp.{x}_proj.bias": (n,) for x, n in (("gate", 14), ("up", 14), ("down", 10))}
    if not config.get("tie_word_embeddings"):
        out["lm_head.weight"] = (23, 10)
    return {n: ("BF16", shape) for n, shape in out.items()}


CASES = {
    "llama with biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "llama tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_there_and_back(case: str, to: str, tmp_path: Path) -> None:
    config = BASE | CASES[case]
    src = write_hf(tmp_path / "hf", config, inventory(config))
    for name, options in {"a": {"tp": 2, "pp": 2}, "b": {}}.items():
        convtools.convert(src, tmp_path / name, convtools.Options(to=to, **options))
        convtools.convert(tmp_path / name, tmp_path / f"{name}.hf", convtools.Options(to="hf"))
        assert differences(read_hf(src), read_hf(tmp_path / f"{name}.hf")) == []


def test_mixtrals_w1_is_the_gate_and_w3_is_up(tmp_path: Path) -> None:
    """At tp 2 rank 1 holds rows 7 to 14 of w1, then rows 7 to 14 of w3; and columns 7 to 14 of w2."""
    config = BASE | CASES["mixtral"]
    src = write_hf(tmp_path / "hf", config, inventory(config))
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch", tp=2))
    _, rank, _ = read_rank(tmp_path / "m/iter_0000001/mp_rank_01/model_optim_rng.pt")
    hf, at = read_hf(src), "model.layers.1.block_sparse_moe.experts.3."
    w1, w2, w3 = (hf[f"{at}w{i}.weight"][2] for i in (1, 2, 3))
    assert rank["decoder.layers.1.mlp.experts.linear_fc1.weight3"][2] == w1[140:] + w3[140:]
    halves = b"".join(w2[row * 28 + 14 : row * 28 + 28] for row in range(10))
    assert rank["decoder.layers.1.mlp.experts.linear_fc2.weight3"][2] == halves
