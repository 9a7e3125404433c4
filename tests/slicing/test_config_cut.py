"""The config of a slice: every rule, list and count that is per layer, and nothing else."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from convtools.errors import ConfigError, ConvtoolsError
from convtools.slicing.config_cut import Changes, cut_config
from convtools.slicing.config_rules import RULES, with_defaults
from convtools.slicing.layers import find_layers, text_part
from convtools.slicing.rule import restated
from tests.convert.small import filled, write_small_hf
from tests.slicing.cutting import cut

Config = dict[str, Any]


def sliced(
    config: Config, keep: list[int], n: int = 0, tail: int = 0, **options: Any
) -> tuple[Config, Changes]:
    text = text_part(config)
    n = n or text["num_hidden_layers"]
    names = [f"model.layers.{i}.norm.weight" for i in range(n + tail)]
    return cut_config(config, find_layers(names, text), keep, **options)


def new(config: Config, keep: list[int], n: int = 0, tail: int = 0, **options: Any) -> Config:
    """Only the fields that changed."""
    before = copy.deepcopy(config)
    after, _ = sliced(config, keep, n, tail, **options)
    assert config == before, "the source's config was changed"
    assert [k for k in after if k in before] == list(before), "the order of the keys"
    assert before.keys() <= after.keys()
    return {k: v for k, v in after.items() if k not in before or before[k] != v}


N12: Config = {"num_hidden_layers": 12}
WINDOW: Config = {"sliding_window": 4096}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

# a rule's config, layers to keep, the fields that must change beside the count ({}: none; None: refused)
RULED: list[tuple[Config, list[int], Config | None]] = [
    # DeepSeek: dense below the threshold
    ({"first_k_dense_replace": 3}, [1, 2, 4], {"first_k_dense_replace": 2}),
    ({"first_k_dense_replace": 2}, [1, 2, 4], {"first_k_dense_replace": 1}),
    ({"first_k_dense_replace": 2}, [2, 3], {"first_k_dense_replace": 0}),
    ({"first_k_dense_replace": 2}, [0, 1], {}),
    ({"first_k_dense_replace": 2}, [2, 0], None),
    ({"first_k_dense_replace": 2}, [0, 5, 1], None),
    ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, [0, 5], {}),
    ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [0, 2, 4], {"moe_layer_freq": 1}),
    ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [0, 1, 2, 3], {}),
    ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 3, 5], None),
    ({"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10}, [3, 1],
     {"mlp_layer_types": ["sparse", "dense"]}),
    ({"first_k_dense_replace": 2, "moe_layer_freq": [0] * 2 + [1] * 10}, [3, 1], {"moe_layer_freq": [1, 0]}),
    # Qwen
    ({"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}, [3, 1], {}),
    ({"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [3, 5]}, [1, 5, 3, 2],
     {"mlp_only_layers": [1, 2]}),
    ({"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": []}, [0, 1, 4, 5], {}),
    ({"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 3, 2, 1],
     {"mlp_only_layers": [0, 2, 3]}),
    ({"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": []}, [1, 2, 3],
     {"decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    ({"num_experts": 0, "decoder_sparse_step": 2, "mlp_only_layers": []}, [1, 2], {}),
    # Llama 4
    ({"interleave_moe_layer_step": 2}, [0, 1, 4, 5], {}),
    ({"interleave_moe_layer_step": 2}, [1, 2], {"moe_layers": [0]}),
    ({"interleave_moe_layer_step": 2, "moe_layers": [1, 3, 5, 7, 9, 11]}, [2, 3, 5], {"moe_layers": [1, 2]}),
    ({"model_type": "llama4_text", "no_rope_layers": []}, [0, 3, 4],
     {"no_rope_layers": [1, 0, 1]}),
    ({"no_rope_layer_interval": 4}, [0, 1, 2, 3, 4], {}),
    ({"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 3}, [3, 0], {"no_rope_layers": [0, 1]}),
    # Ernie 4.5
    ({"moe_layer_start_index": 3, "moe_layer_end_index": 10, "moe_layer_interval": 1}, [2, 3, 4, 11],
     {"moe_layer_start_index": 1, "moe_layer_end_index": 2}),
    ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}, [0, 7], {}),
    ({"moe_layer_start_index": 3, "moe_layer_end_index": 10, "moe_layer_interval": 1}, [0, 1],
     {}),
    ({"moe_layer_start_index": 1, "moe_layer_end_index": 11, "moe_layer_interval": 2}, [1, 3],
     {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 1}),
    ({"moe_layer_start_index": 1, "moe_layer_end_index": 11, "moe_layer_interval": 1}, [1, 0, 2], None),
    # Afmoe, LFM2; Hunyuan
    ({"num_dense_layers": 2}, [0, 4], {"num_dense_layers": 1}),
    ({"num_dense_layers": 2}, [4, 0], None),
    ({"moe_layer_num_skipped": 2}, [1, 4], {"moe_layer_num_skipped": 1}),
    # Jamba
    ({"attn_layer_period": 8, "attn_layer_offset": 4, "num_experts": 4, "expert_layer_period": 2,
      "expert_layer_offset": 1}, [0, 1, 2, 3, 4, 5], {}),
    ({"attn_layer_period": 8, "attn_layer_offset": 4, "num_experts": 4, "expert_layer_period": 2,
      "expert_layer_offset": 1}, [3, 4, 5, 6],
     {"expert_layer_offset": 0, "attn_layer_offset": 1}),
    ({"attn_layer_period": 8, "attn_layer_offset": 4}, [4, 11, 4, 4], None),
    ({"num_experts": 1, "expert_layer_period": 2, "expert_layer_offset": 1}, [0, 1, 3], {}),
    # windows
    ({"use_sliding_window": True, "max_window_layers": 6, "model_type": "qwen2"}, [5, 6],
     {"layer_types": [FULL, SLIDING]}),
    ({"use_sliding_window": True, "max_window_layers": 2, "model_type": "else"}, [1, 6],
     {"max_window_layers": 1}),
    ({"use_sliding_window": True, "max_window_layers": 6, "model_type": "else"}, [6, 5], None),
    ({"use_sliding_window": False, "max_window_layers": 6}, [5, 6], {}),
    (WINDOW | {"sliding_window_pattern": 6, "model_type": "gemma3_text"}, [5, 6, 11], {"layer_types": [FULL,
     SLIDING, FULL]}),
    (WINDOW | {"sliding_window_pattern": 6, "model_type": "else"}, [5, 6, 11], None),
    (WINDOW | {"sliding_window_pattern": 6, "model_type": "else"}, [4, 5], {"sliding_window_pattern": 2}),
    (WINDOW | {"sliding_window_pattern": 6, "model_type": "else"}, [0, 1, 2, 3, 4, 5], {}),
    (WINDOW | {"sliding_window_pattern": "LLLG", "model_type": "exaone4"}, [3, 4], {"layer_types": [FULL,
     SLIDING]}),
    (WINDOW | {"sliding_window_pattern": "LLLG", "model_type": "else"}, [3, 4], None),
    ({"sliding_window": None, "sliding_window_pattern": 6}, [5, 6, 11], {}),
    (WINDOW | {"_sliding_window_pattern": 6, "model_type": "gemma3_text",
     "layer_types": ([SLIDING] * 5 + [FULL]) * 2},
     [5, 6], {"layer_types": [FULL, SLIDING]}),
    (WINDOW | {"_sliding_window_pattern": 6, "model_type": "gemma3_text", "layer_types": None}, [5, 6],
     {"layer_types": [FULL, SLIDING]}),
    ({"full_attention_interval": 4, "model_type": "qwen3_next"}, [3, 4], {"layer_types": [FULL, LINEAR]}),
    ({"full_attention_interval": 4, "model_type": "qwen3_next"}, [0, 1, 2, 3], {}),
    ({"global_attn_every_n_layers": 3, "model_type": "modernbert-decoder"}, [0, 3], {"layer_types": [FULL,
     FULL]}),
    ({"global_attn_every_n_layers": 3, "model_type": "afmoe"}, [0, 3], {}),
    ({"layer_group_size": 4, "model_type": "bailing_moe_linear"}, [0, 3], {"layer_group_size": 2}),
    ({"layer_group_size": 4, "model_type": "bailing_moe_linear"}, [0, 1], None),
    ({"layer_group_size": 4, "model_type": "bailing_hybrid"}, [3, 1], {"layer_types": [FULL, LINEAR]}),
    ({"block_types": ["recurrent", "recurrent", "attention"]}, [2, 3], {"block_types": ["attention",
     "recurrent"]}),
    ({"block_types": ["recurrent", "recurrent", "attention"]}, [0, 1, 5], {}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "keep", "changed"), RULED, ids=lambda x: json.dumps(x)[:60])
def test_every_rule_is_kept_restated_or_refused(
    config: Config, keep: list[int], changed: Config | None
) -> None:
    config = N12 | config
    if changed is None:
        with pytest.raises(ConfigError, match="the config cannot say"):
            sliced(config, keep)
    else:
        assert new(config, keep) == changed | {"num_hidden_layers": len(keep)}


def test_no_rule_is_without_its_rows() -> None:
    for rule in RULES:
        met = [changed for config, _, changed in RULED if rule.applies(with_defaults(N12 | config))]
        assert met, rule.keys


RULED_CONFIGS = [with_defaults(N12 | config) for config, _, _ in RULED]


@given(st.sampled_from(RULED_CONFIGS), st.lists(st.integers(0, 11), min_size=1, max_size=12))
def test_what_is_restated_says_what_the_layers_were(config: Config, keep: list[int]) -> None:
    for rule in RULES:
        if rule.applies(config) and (found := restated(rule, config, keep)) is not None:
            after = config | {"num_hidden_layers": len(keep)} | found
            assert [rule.meaning(after, i) for i in range(len(keep))] == [
                rule.meaning(config, i) for i in keep
            ]
    everything = list(range(12))
    for rule in RULES:
        assert not rule.applies(config) or restated(rule, config, everything) == {}


def test_the_defaults_of_a_models_code_count_b70() -> None:
    """Gemma 3's published config has no pattern: its code takes 6 for granted."""
    config = N12 | WINDOW | {"model_type": "gemma3_text"}
    assert new(config, [4, 5]) == {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    assert new(N12 | {"model_type": "gemma2"}, [1, 2]) == {
        "num_hidden_layers": 2,
        "layer_types": [FULL, SLIDING],
    }
    assert new(N12 | {"model_type": "gemma2"}, [2, 5]) == {"num_hidden_layers": 2}
    assert new(N12 | {"model_type": "gpt_oss"}, [1]) == {"num_hidden_layers": 1, "layer_types": [FULL]}


LISTED: list[tuple[Config, list[int], Config]] = [
    ({"layer_types": [f"kind {i}" for i in range(12)]}, [11, 2], {"layer_types": ["kind 11", "kind 2"]}),
    ({"mlp_layer_types": ["dense"] + ["sparse"] * 11}, [0, 11], {"mlp_layer_types": ["dense", "sparse"]}),
    ({"moe_layer_freq": [0] + [1] * 11}, [0, 11], {"moe_layer_freq": [0, 1]}),
    ({"attn_type_list": [0, 1] * 6}, [1, 2], {"attn_type_list": [1, 0]}),
    ({"hybrid_layer_pattern": [0, 1] * 6}, [2, 3], {"hybrid_layer_pattern": [0, 1]}),
    ({"num_attention_heads": list(range(12))}, [3], {"num_attention_heads": [3]}),
    ({"moe_topk": list(range(12))}, [3, 4], {"moe_topk": [3, 4]}),
    ({"block_configs": [{"no": i} for i in range(12)]}, [3], {"block_configs": [{"no": 3}]}),
    ({"full_attn_idxs": [2, 5, 8]}, [5, 6, 8], {"full_attn_idxs": [0, 2]}),
    ({"attn_layer_indices": [9, 10]}, [9], {"attn_layer_indices": [0]}),
    ({"cross_attention_layers": [3, 8]}, [0, 1], {"cross_attention_layers": []}),
    ({"moe_layers_enum": "4,5,6,7"}, [3, 4, 7], {"moe_layers_enum": "1,2"}),
    ({"linear_attn_config": {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4, 8], "num_heads": 3}}, [3, 4],
     {"linear_attn_config": {"kda_layers": [2], "full_attn_layers": [1], "num_heads": 3}}),
    ({"per_layer_config": {"05": {"a": 1}, "11": {"a": 2}, "all": 3}}, [5, 7, 11],
     {"per_layer_config": {"all": 3, "00": {"a": 1}, "02": {"a": 2}}}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "keep", "changed"), LISTED, ids=lambda x: json.dumps(x)[:60])
def test_lists_are_cut_and_renumbered(config: Config, keep: list[int], changed: Config) -> None:
    assert new(N12 | config, keep) == changed | {"num_hidden_layers": len(keep)}
    after, changes = sliced(N12 | config, keep)
    assert not [note for note in changes.notes if "not-per-layer" in note], "it is known"
    nested = {"text_config": N12 | config, "vision_config": copy.deepcopy(N12 | config), "x": 1}
    after, _ = sliced(nested, keep)
    assert after == nested | {"text_config": N12 | config | changed | {"num_hidden_layers": len(keep)}}


def test_fields_that_stand_in_both_parts_of_a_config() -> None:
    inner = N12 | {"layer_types": list("abcdefghijkl"), "first_k_dense_replace": 1}
    config = inner | {
        "text_config": inner,
        "first_k_dense_replace": 3,
        "vision_config": {"num_hidden_layers": 12},
    }
    cut = {"num_hidden_layers": 2, "layer_types": ["b", "d"]}
    after, _ = sliced(config, [1, 3])
    assert after == config | cut | {"text_config": inner | cut | {"first_k_dense_replace": 0}}


def test_an_unknown_list_of_that_length_is_cut_and_said_so() -> None:
    config = N12 | {"strange": list("abcdefghijkl"), "short": list("ab"), "eos_token_id": list(range(12))}
    after, changes = sliced(config, [11, 0])
    assert after == config | {"num_hidden_layers": 2, "strange": ["l", "a"]}
    assert [note for note in changes.notes if "`strange`" in note and "--not-per-layer strange" in note]
    assert "strange" in " ".join(changes.made)
    assert sliced(config, [11, 0], not_per_layer=["strange"])[0] == config | {"num_hidden_layers": 2}
    deep = N12 | {"rope": {"factors": list(range(12))}}
    assert sliced(deep, [1])[0]["rope"] == {"factors": [1]}


TYPES = [FULL, SLIDING, SLIDING]


def test_lists_may_go_on_for_mtp_b58() -> None:
    config = {
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 2,
        "layer_types": [*TYPES, "x", "y"],
        "swiglu": [1, 2, 3, 4, 5],
    }
    after, changes = sliced(config, [2, 0], 3, 2)
    assert after["layer_types"] == [SLIDING, FULL, "x", "y"] and after["swiglu"] == [3, 1, 4, 5]
    assert [n for n in changes.notes if "`layer_types` goes on behind the last layer, for MTP: kept so" in n]
    after, changes = sliced(config, [2, 0], 3, 2, drop_mtp=True)
    assert after["layer_types"] == [SLIDING, FULL] and after["num_nextn_predict_layers"] == 0
    assert [n for n in changes.notes if "cut off with it" in n]


@pytest.mark.parametrize("entries", [1, 2, 4, 6])
def test_lists_of_other_lengths_are_refused_b58(entries: int) -> None:
    config = {"num_hidden_layers": 3, "num_nextn_predict_layers": 2, "layer_types": ["x"] * entries}
    with pytest.raises(ConfigError, match=f"`layer_types` has {entries} entries") as caught:
        sliced(config, [0], 3, 2)
    assert "3, one a layer, or 5 with MTP" in str(caught.value)


def test_both_spellings_of_a_pattern_b59() -> None:
    words = ["mamba", "moe", "attention", "mlp"]
    config = {"hybrid_override_pattern": "ME|*-/*E", "layers_block_type": words, "num_hidden_layers": 4}
    assert new(config, [2, 0]) == {
        "hybrid_override_pattern": "*M/*E", "layers_block_type": ["attention", "mamba"],
         "num_hidden_layers": 2,
    }  # fmt: skip
    assert new(config, [2, 0], drop_mtp=True)["hybrid_override_pattern"] == "*M"
    assert new({"hybrid_override_pattern": "MEM*EMEMEM*-"}, [10, 2, 3], 12) == {
        "hybrid_override_pattern": "*M*"
    }


def test_no_count_is_added_b60() -> None:
    assert new({"layers_block_type": ["mamba", "moe"], "a": None}, [1], 2) == {"layers_block_type": ["moe"]}
    assert new({"n_layer": 12}, [1, 2], 12) == {"n_layer": 2}


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 3, "hybrid_override_pattern": "ME*-"},
        {"num_hidden_layers": 3, "n_layer": 4},
        {"hybrid_override_pattern": "ME*-", "layers_block_type": ["mamba"] * 3},
    ],
)
def test_contradictions_are_refused_b60(config: Config) -> None:
    with pytest.raises(ConfigError, match="contradicts itself"):
        find_layers([f"model.layers.{i}.x" for i in range(4)], config)


GEMMA_3N: Config = {
    "num_hidden_layers": 8, "num_kv_shared_layers": 4, "layer_types": [SLIDING, SLIDING, FULL, SLIDING,
     SLIDING, FULL, SLIDING, FULL],
}  # fmt: skip


def test_layers_that_share_keys_and_values() -> None:
    assert new(GEMMA_3N, [2, 3, 6, 7])["num_kv_shared_layers"] == 2
    assert new(GEMMA_3N, [0, 1, 2])["num_kv_shared_layers"] == 0
    assert new(GEMMA_3N, [0, 3, 4])["num_kv_shared_layers"] == 1
    with pytest.raises(ConfigError, match="layer 7 uses the keys and values of layer 2"):
        sliced(GEMMA_3N, [0, 1, 3, 7])
    with pytest.raises(ConfigError, match="layer 4 uses the keys and values of layer 3"):
        sliced(GEMMA_3N, [0, 1, 4])
    with pytest.raises(ConfigError, match="must be the last ones"):
        sliced(GEMMA_3N, [3, 4, 0])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_mem_blocks": 2}, "shared by several layers"),
        ({"use_cla": True}, "the layer before"),
        ({"hidden_size_per_layer_input": 256}, "an embedding for every layer"),
        ({"kv_source_layers": [0, 0, 2, 2, *range(4, 12)]}, "keys and values of others"),
    ],
)
def test_models_whose_layers_hang_together_are_refused(fields: Config, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sliced(N12 | fields, [0, 1])
    assert new(N12 | fields, list(range(12))) == {}


def test_what_is_not_understood_is_said() -> None:
    config = N12 | {"magic_layer_interval": 3, "hidden_size": 12, "scale_depth": 1.4}
    after, changes = sliced(config, [0, 1])
    assert after == config | {"num_hidden_layers": 2}
    notes = " ".join(changes.notes)
    assert "not understood: `magic_layer_interval` 3" in notes and "`scale_depth` 1.4" in notes


def test_nothing_changes_where_nothing_has_to(tmp_path: Path) -> None:
    """The very bytes of the source's config, odd spacing and keys included."""
    content = filled({f"model.layers.{i}.mlp.up_proj.weight": ("BF16", (3, 5)) for i in range(3)})
    src = write_small_hf(tmp_path / "src", {}, content)
    text = '{"z": 1.50,\n\t"num_hidden_layers":3 , "a": {"\\u00e9": Infinity, "layer_types": ["x","y","z"]}}'
    (src / "config.json").write_text(text)
    cut(src, tmp_path / "all", layers="0-2")
    assert (tmp_path / "all/config.json").read_text() == text
    cut(src, tmp_path / "one", layers="1")
    made = json.loads((tmp_path / "one/config.json").read_text())
    assert made == json.loads(text) | {"num_hidden_layers": 1, "a": {"é": float("inf"), "layer_types": ["y"]}}
    assert list(made) == ["z", "num_hidden_layers", "a"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({key for rule in RULES for key in rule.keys} | {
    "layer_types", "layers_block_type", "num_nextn_predict_layers", "num_kv_shared_layers",
     "quantization_config",
    "kda_layers", "moe_layers_enum", "per_layer_config", "text_config", "hybrid_override_pattern",
})  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
@example({"moe_layers": False, "interleave_moe_layer_step": 1}, [0])
@example({"mlp_only_layers": True, "decoder_sparse_step": 1, "num_experts": 4}, [0])
def test_hostile_configs_are_cut_or_refused(config: Config, keep: list[int]) -> None:
    try:
        after, _ = sliced({"num_hidden_layers": 4} | config, keep, 4)
    except ConvtoolsError:
        return
    assert json.dumps(after)
