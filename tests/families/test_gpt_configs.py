"""Configs of the GPT families with experts: spellings, dense layers, and config.json derived from args."""

from pathlib import Path
from typing import Any

import pytest

import convtools
from convtools.errors import ConfigError
from convtools.families import deepseek, glm, mixtral, qwen
from convtools.families.gpt import Spelling
from convtools.families.table import Table
from tests.convert.small import read_dist, write_small_hf
from tests.families.test_glm import DEEPSEEK, GLM, QWEN2_MOE, content_of, options, small

NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


def test_layers_that_differ_have_keys_of_their_own_and_megatron_is_told_which(tmp_path: Path) -> None:
    """As Megatron's own: `moe_layer_freq` is a list, and no key stacks layers; else all keys do."""
    base = small(QWEN2_MOE) | {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": []}
    for changes, freq in (
        ({}, 1),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, 1),
        ({"decoder_sparse_step": 2}, [0, 1, 0]),
        ({"mlp_only_layers": [2]}, [1, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0]),
    ):
        config = base | changes
        spec = qwen.parse(config)
        assert qwen.megatron_args(config, spec, Spelling())["moe_layer_freq"] == freq
        table = Table.of(qwen.rows(spec, Spelling(), 32))
        assert {p.layers for n, p in table.params.items() if ".layers." in n} == {3 if freq == 1 else 0}
    config = base | {"mlp_only_layers": [2]}
    src = write_small_hf(tmp_path / "hf", config, content_of(config))
    convtools.convert(src, tmp_path / "m", options("torch_dist"))
    keys, _ = read_dist(tmp_path / "m/iter_0000001")
    assert keys["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"][1] == (12, 36, 20)
    assert keys["decoder.layers.2.mlp.linear_fc1.weight"][1] == (104, 20)
    assert not any(n.startswith("decoder.layers.self_attention") for n in keys)


@pytest.mark.parametrize("value", [[12], [-1], [True], ["0"], {}, "0"], ids=str)
def test_dense_layers_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="`mlp_only_layers` must list indices of the 12 layers"):
        qwen.parse(QWEN2_MOE | {"mlp_only_layers": value})


def test_a_config_of_absurd_sizes_is_refused_before_its_table_is_made() -> None:
    for family, config in ((glm, GLM), (deepseek, DEEPSEEK), (qwen, QWEN2_MOE)):
        huge = config | {"num_hidden_layers": 10_000, "num_experts": None, "n_routed_experts": 60_000}
        with pytest.raises(ConfigError, match=r"the model would have over \d+ tensors"):
            family.parse(huge)  # type: ignore[attr-defined]


def test_config_spellings_of_transformers_4_and_5() -> None:
    five = {k: v for k, v in GLM.items() if k not in ("rope_theta", "partial_rotary_factor")}
    five |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}
    five |= {"num_nextn_predict_layers": None, "num_mtp_layers": 2}
    five |= {"n_routed_experts": None, "num_local_experts": 12}
    four_spec, five_spec = glm.parse(GLM), glm.parse(five)
    assert four_spec == five_spec
    args = glm.megatron_args(GLM, four_spec, Spelling())
    assert args == glm.megatron_args(five, five_spec, Spelling())
    assert (args["rotary_base"], args["rotary_percent"]) == (1e6, 0.5)
    for config, family in ((QWEN2_MOE, qwen), (DEEPSEEK, deepseek)):
        specs = [
            family.parse(config | dict.fromkeys(NAMES) | {name: 12})  # type: ignore[attr-defined]
            for name in NAMES
        ]
        assert specs[0] == specs[1] == specs[2]
    with pytest.raises(ConfigError, match="contradiction"):
        glm.parse(GLM | {"num_local_experts": 13})


MIXTRAL = {k: v for k, v in QWEN2_MOE.items() if k != "mlp_only_layers"} | {
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 18,
}
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip
DERIVED = {
    "glm": (glm, GLM),
    "glm without MTP or biases": (
        glm,
        GLM | {"num_nextn_predict_layers": 0, "attention_bias": False, "use_qk_norm": False},
    ),
    "qwen2 moe": (qwen, QWEN2_MOE),
    "qwen3 moe": (qwen, QWEN2_MOE | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}),
    "mixtral": (mixtral, MIXTRAL),
    "deepseek": (deepseek, DEEPSEEK),
    "deepseek with yarn": (deepseek, DEEPSEEK | {"rope_scaling": YARN, "q_lora_rank": None}),
}


@pytest.mark.parametrize("case", DERIVED)
def test_a_config_that_is_derived_from_args_describes_the_same_model(case: str) -> None:
    family, config = DERIVED[case]
    spec = family.parse(config)
    args = family.megatron_args(config, spec, Spelling())
    found, missing = family.hf_config(args, {})
    assert missing == []
    assert family.parse(found) == spec
    again = family.megatron_args(found, family.parse(found), Spelling())
    assert again | {"init_method_std": None} == args | {"init_method_std": None}
    others = [f for f in (glm, qwen, mixtral, deepseek) if f is not family]
    assert all(other.hf_config(args, {})[1] for other in others)  # no other family takes it for its own


def test_what_args_of_latent_attention_do_not_say_is_named() -> None:
    """Megatron-LM's args leave these to defaults of megatron-core, which need not be the model's."""
    config = DEEPSEEK | {"rope_scaling": YARN}
    args = deepseek.megatron_args(config, deepseek.parse(config), Spelling())
    for name in ("original_max_position_embeddings", "beta_fast"):
        del args[name]
    _, missing = deepseek.hf_config(args, {})
    assert missing == ["rope_scaling.original_max_position_embeddings", "rope_scaling.beta_fast"]
    _, missing = deepseek.hf_config(args | {"moe_layer_freq": [0, 1, 0]}, {})
    assert "first_k_dense_replace" in missing


@pytest.mark.parametrize(
    "note", [{"fused_experts": 1}, {"mtp": "yes"}, {"prefix": 3}, {"prefix": "a/../b"}, {"mtp_head": None}]
)
def test_a_note_that_is_none_is_refused(note: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"true or false|begin with"):
        Spelling(**note)
