"""Prefixes, sections and what the top of a nested config decides."""

from typing import Any

import pytest

from convtools.errors import AccountingError, ConfigError
from convtools.families.gpt import rope_theta
from convtools.families.registry import language_model
from convtools.families.wrapping import Wrapping, find_prefix, find_wrapping, group_outside, own_config

OWN = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight",
       "lm_head.weight", "mtp.layers.0.eh_proj.weight"]  # fmt: skip
SPELLED = {
    "": OWN,
    "model.language_model.": [
        "model.language_model.embed_tokens.weight", "model.language_model.layers.0.mlp.up_proj.weight",
        "model.language_model.norm.weight", "lm_head.weight", "mtp.layers.0.eh_proj.weight",
    ],
    "language_model.": [
        "language_model.model.embed_tokens.weight", "language_model.model.layers.0.mlp.up_proj.weight",
        "language_model.model.norm.weight", "language_model.lm_head.weight",
        "language_model.mtp.layers.0.eh_proj.weight",
    ],
}  # fmt: skip
TOWERS = {
    "": ["visual.patch_embed.proj.weight", "vision_tower.a.weight"],
    "model.language_model.": [
        "model.visual.blocks.0.norm1.weight",
        "model.multi_modal_projector.w",
        "image_newline",
    ],
    "language_model.": ["vision_tower.layers.0.w", "multi_modal_projector.linear_1.bias", "model.visual.w"],
}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 24,
    "num_attention_heads": 2, "intermediate_size": 12,
}  # fmt: skip


@pytest.mark.parametrize("prefix", SPELLED)
def test_names_there_and_back(prefix: str) -> None:
    wrapping = Wrapping(prefix)
    assert [wrapping.outer(name) for name in OWN] == SPELLED[prefix]
    assert [wrapping.inner(name) for name in SPELLED[prefix]] == OWN
    assert find_prefix(SPELLED[prefix] + TOWERS[prefix], nested=True) == prefix
    assert [n for n in SPELLED[prefix] + TOWERS[prefix] if wrapping.outside(n)] == TOWERS[prefix]


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("backbone.layers.3.norm.weight", "backbone.layers.3.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_nemotrons_names_under_language_model(name: str, inner: str) -> None:
    assert Wrapping("language_model.").outer(inner) == f"language_model.{name}"
    assert find_prefix([f"language_model.{name}", "language_model.backbone.layers.0.x"], nested=True) == (
        "language_model."
    )


@pytest.mark.parametrize("prefix", [p for p in SPELLED if p])
def test_a_name_of_another_spelling_is_no_tower(prefix: str) -> None:
    """So it is accounted for, and refused, and never passes through as if it were of a tower."""
    for other in SPELLED.values():
        assert not any(Wrapping(prefix).outside(name) for name in other)


def test_an_unclear_prefix_names_what_was_seen() -> None:
    with pytest.raises(AccountingError) as two:
        find_prefix([*SPELLED[""], *SPELLED["language_model."]], nested=True)
    assert "`model.embed_tokens.weight`, `language_model.model.embed_tokens.weight`" in str(two.value)
    with pytest.raises(AccountingError) as none:
        find_prefix(["transformer.h.0.attn.weight"], nested=True)
    for words in (
        "`model.language_model.layers.`",
        "`language_model.model.layers.`",
        "`transformer.h.0.attn",
    ):
        assert words in str(none.value)
    assert find_prefix(["layers.0.x"], nested=False) == ""  # a flat config's family knows more


@pytest.mark.parametrize("value", ["vision.", None, 3, ["model."], "model"])
def test_a_strange_prefix_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match="no language model's names begin with"):
        Wrapping(value)
    with pytest.raises(ValueError):
        Wrapping("", value)


@pytest.mark.parametrize("section", ["text_config", "llm_config", "language_config"])
def test_the_section_is_found(section: str) -> None:
    found = language_model({"architectures": ["LlavaForConditionalGeneration"], section: LLAMA})
    assert (found.family.NAME, found.section) == ("llama", section)
    assert found.config == LLAMA | {"architectures": ["LlamaForCausalLM"]}
    assert found.parse().hidden == 8


def test_two_sections_that_differ_are_refused() -> None:
    both = {"text_config": LLAMA, "llm_config": LLAMA}
    assert language_model(both).section == "text_config"
    with pytest.raises(ConfigError, match="several language models"):
        language_model(both | {"llm_config": LLAMA | {"hidden_size": 16}})


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"), ("mistral", "MistralForCausalLM"), ("mixtral", "MixtralForCausalLM"),
        ("qwen2_vl_text", "Qwen2ForCausalLM"), ("qwen2_5_vl_text", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"), ("qwen3_vl_text", "Qwen3ForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"), ("qwen3_vl_moe_text", "Qwen3MoeForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"), ("kimi_k2", "DeepseekV3ForCausalLM"),
        ("nemotron_h", "NemotronHForCausalLM"),
    ],
)  # fmt: skip
def test_an_architecture_by_its_model_type(model_type: str, architecture: str) -> None:
    for names in (None, [], ["SomeVLForConditionalGeneration"]):
        found = language_model({"text_config": {"model_type": model_type, "architectures": names}})
        assert found.config["architectures"] == [architecture]
    assert language_model({"model_type": model_type}).config["architectures"] == [architecture]


def test_the_first_known_architecture_of_several() -> None:
    found = language_model(LLAMA | {"architectures": ["MyLlama", "LlamaForCausalLM", "Qwen3ForCausalLM"]})
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert found.parse().vocab == 24


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"architectures": ["CLIPModel"], "text_config": {"model_type": "clip_text_model"}},
        {"architectures": {"LlamaForCausalLM": 1}},
        {"text_config": "llama"},
        {"text_config": {"model_type": ["llama"], "architectures": 7}},
        {},
    ],
)
def test_what_no_family_knows(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no family in convtools knows this architecture"):
        language_model(config)


def test_sizes_at_the_top_are_not_the_language_models() -> None:
    inner = {k: v for k, v in LLAMA.items() if k not in ("hidden_size", "vocab_size")}
    with pytest.raises(ConfigError) as error:
        language_model({"text_config": inner, "hidden_size": 8, "vocab_size": 24}).parse()
    for words in ("`hidden_size` is missing", "`vocab_size` is missing", "config.json, `text_config`"):
        assert words in str(error.value)


def test_the_top_decides_the_tie_and_the_dtype() -> None:
    config = {"tie_word_embeddings": True, "torch_dtype": "float16", "hidden_size": 5,
              "text_config": LLAMA | {"tie_word_embeddings": False, "dtype": "bfloat16"}}  # fmt: skip
    assert own_config(config, "text_config", "X") == LLAMA | {
        "architectures": ["X"], "tie_word_embeddings": True, "dtype": "float16"
    }  # fmt: skip
    del config["tie_word_embeddings"], config["torch_dtype"]
    assert own_config(config, "text_config", "X") == LLAMA | {
        "architectures": ["X"], "tie_word_embeddings": False, "dtype": "bfloat16"
    }  # fmt: skip


@pytest.mark.parametrize("top", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
@pytest.mark.parametrize("head", [True, False])
def test_a_head_is_its_own_where_the_section_says_so(top: Any, inner: Any, head: bool) -> None:
    config = {"tie_word_embeddings": top, "text_config": LLAMA | {"tie_word_embeddings": inner}}
    names = [n for n in SPELLED["language_model."] if head or "lm_head" not in n]
    wrapping = find_wrapping(config, "text_config", names)
    assert wrapping == Wrapping("language_model.", untied=(top, inner, head) == (True, False, True))


def test_groups_of_outside_tensors() -> None:
    assert group_outside(["model.visual.a.b", "model.visual.c", "tower.x.w", "newline", "model.z"]) == [
        "2 tensors under `model.visual.`", "1 tensor under `tower.`",
        "1 tensor `newline`", "1 tensor `model.z`",
    ]  # fmt: skip
    assert group_outside([f"t{i}.{j}" for i in range(10) for j in "ab"], limit=2) == [
        "2 tensors under `t0.`", "2 tensors under `t1.`", "16 more under 8 other names"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"full": {"rope_theta": 7e4}, "sliding": {"rope_theta": 7e4}}}, 7e4),
    ],
)  # fmt: skip
def test_b13_rope_theta_in_both_spellings(config: dict[str, Any], theta: float) -> None:
    assert rope_theta(config) == theta


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e4}}},
    ],
)
def test_b13_a_base_that_is_missing_or_not_one_is_refused(config: dict[str, Any]) -> None:
    """Megatron would take 10000 for it, and short prompts would still look right."""
    with pytest.raises(ConfigError, match="rotary"):
        rope_theta(config)
