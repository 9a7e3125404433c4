"""Which tensor belongs to which layer, and what each layer is, from names and the config."""

from typing import Any

import pytest

from convtools.errors import AccountingError, ConfigError, ConvtoolsError, UsageError
from convtools.slicing.choose import ADDED, choose
from convtools.slicing.config_cut import check_expressible
from convtools.slicing.kinds import kinds
from convtools.slicing.layers import find_layers, layer_count, text_part
from convtools.slicing.selection import Kind
from tests.nemotron_checkpoints import ULTRA, inventory

PREFIXES = (
    "model.layers.", "transformer.h.", "backbone.layers.", "model.language_model.layers.",
     "gpt_neox.layers.", "h.",
    "language_model.model.layers.", "transformer.blocks.", "model.decoder.layers.", "layers.",
)  # fmt: skip
TWELVE: dict[str, Any] = {"num_hidden_layers": 12}


def names(prefix: str, count: int, part: str = "mlp.up_proj.weight") -> list[str]:
    return [f"{prefix}{i}.{part}" for i in range(count)]


OTHERS = [
    *names("vision_tower.encoder.layers.", 12), *names("model.visual.blocks.", 12), *names("mtp.layers.", 12),
    *names("audio_tower.layers.", 13), *names("model.layers.0.mlp.experts.", 12, "w1"),
    *names("projector.", 12, "weight"), "lm_head.weight",
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_decoder_is_found_among_others(prefix: str) -> None:
    others = [n for n in OTHERS if prefix != "model.layers." or not n.startswith(prefix)]
    others = [n for n in others if prefix == "model.layers." or not n.startswith("model.layers.")]
    layers = find_layers([*others[::-1], *names(prefix, 12)[::-1]], TWELVE)
    assert layers.prefix == prefix and layers.count == 12
    assert layers.decoder == tuple((f"{prefix}{i}.mlp.up_proj.weight",) for i in range(12))
    assert layers.mtp == tuple(n for n in others[::-1] if n.startswith("mtp."))
    assert set(layers.rest) == {n for n in others if not n.startswith("mtp.")}
    assert layers.renumbered(layers.decoder[11][0], 3) == f"{prefix}3.mlp.up_proj.weight"


def test_where_it_is_unclear_the_user_says() -> None:
    two = [*names("model.layers.", 12), *names("other.layers.", 12)]
    with pytest.raises(AccountingError, match="unclear which tensors") as caught:
        find_layers(two, TWELVE)
    assert "--layer-prefix" in str(caught.value) and "`other.layers.`" in str(caught.value)
    assert find_layers(two, TWELVE, "other.layers").prefix == "other.layers."
    with pytest.raises(UsageError, match="no tensor's name begins with `none"):
        find_layers(two, TWELVE, "none")
    with pytest.raises(AccountingError, match="unclear"):
        find_layers(["a.weight"], TWELVE)


def test_mtp_behind_the_last_layer() -> None:
    text = TWELVE | {"num_nextn_predict_layers": 2}
    layers = find_layers(names("model.layers.", 14), text)
    assert layers.count == 12 and layers.tail == (
        ("model.layers.12.mlp.up_proj.weight",),
        ("model.layers.13.mlp.up_proj.weight",),
    )
    assert find_layers(names("model.layers.", 12), text).tail == ()
    with pytest.raises(AccountingError, match="tensors of layers that the config does not have"):
        find_layers(names("model.layers.", 15), text)
    with pytest.raises(AccountingError, match="tensors of layers that the config does not have: 12"):
        find_layers(names("model.layers.", 13), TWELVE)


def test_layers_without_tensors_b68() -> None:
    gap = [n for n in names("model.layers.", 12) if ".5." not in n]
    with pytest.raises(AccountingError, match="layers without any tensor: 5"):
        find_layers(gap, TWELVE)
    with pytest.raises(AccountingError, match="layers without any tensor: 11, 12"):
        find_layers(names("model.layers.", 11), {"num_hidden_layers": 13}, "model.layers")


@pytest.mark.parametrize("count", [10**12, 10**30, 0, -1, True, "4"])
def test_a_count_that_cannot_be_is_refused_at_once(count: Any) -> None:
    if type(count) is not int:
        assert find_layers(names("model.layers.", 4), {"num_hidden_layers": count}).count == 4
        return
    with pytest.raises(ConvtoolsError):
        find_layers(names("model.layers.", 4), {"num_hidden_layers": count})


def test_a_count_that_the_config_does_not_say() -> None:
    assert layer_count({}) is None
    assert find_layers(names("model.layers.", 4), {}).count == 4
    assert layer_count({"hybrid_override_pattern": "ME|*E/*E"}) == 4
    assert layer_count({"layers_block_type": ["mamba"] * 3}) == 3
    with pytest.raises(ConfigError, match="encoder-decoder"):
        layer_count({"is_encoder_decoder": True})


def test_the_language_models_part() -> None:
    inner = {"num_hidden_layers": 4}
    assert text_part({"text_config": inner, "vision_config": {"num_hidden_layers": 9}}) is inner
    assert text_part({"llm_config": inner, "num_hidden_layers": None}) is inner
    assert text_part({"text_config": {}, "num_hidden_layers": 4}) == {
        "text_config": {},
        "num_hidden_layers": 4,
    }


def told(decoder: list[list[str]], text: dict[str, Any]) -> list[str]:
    every = [f"model.layers.{i}.{part}" for i, parts in enumerate(decoder) for part in parts]
    return [str(kind) for kind in kinds(find_layers(every, {"num_hidden_layers": len(decoder)} | text), text)]


ATTENTION, DENSE = ["self_attn.q_proj.weight", "input_layernorm.weight"], ["mlp.up_proj.weight"]
MOE = ["mlp.gate.weight", "mlp.experts.0.up_proj.weight", "mlp.experts.1.up_proj.weight"]


def test_kinds_from_names_alone() -> None:
    found = told(
        [
            ATTENTION + DENSE, ATTENTION + MOE, ["linear_attn.A_log", *DENSE], ["mamba.A_log"],
            ["self_attn.kv_a_proj_with_mqa.weight", *DENSE], ["conv.conv.weight", *DENSE],
            ["mamba.A_log", "self_attn.q_proj.weight", *DENSE], [*ATTENTION, "self_attn.q_norm.weight",
             *DENSE],
            [*ATTENTION, "block_sparse_moe.router.layer.weight", "block_sparse_moe.input_linear.weight"],
            ["mixer.experts.0.up_proj.weight", "mixer.gate.weight", "norm.weight"], ["mixer.up_proj.weight"],
        ],
        {},
    )  # fmt: skip
    assert found == [
        "attention + dense", "attention + MoE", "linear attention + dense", "mamba", "MLA + dense",
        "convolution + dense", "mamba and attention + dense", "attention (2) + dense", "attention + MoE (2)",
        "MoE (3)", "dense (2)",
    ]  # fmt: skip


def test_fewer_experts_are_no_other_kind_b63() -> None:
    """Each layer is looked at for itself, not held against layer 0."""
    more = [*MOE, "mlp.experts.10.up_proj.weight"]
    assert told([ATTENTION + MOE, ATTENTION + more], {}) == ["attention + MoE"] * 2


def test_kinds_from_words_and_rules() -> None:
    both = [ATTENTION + DENSE] * 2
    assert told(both, {"layer_types": ["full_attention", "sliding_attention"]}) == [
        "full attention + dense", "sliding attention + dense",
    ]  # fmt: skip
    assert told(both, {"attn_type_list": [0, 1]}) == ["linear attention + dense", "full attention + dense"]
    assert told(both, {"no_rope_layers": [1, 0]}) == ["attention + dense", "without rope + dense"]
    assert told(both, {"model_type": "gemma2"}) == ["sliding attention + dense", "full attention + dense"]


@pytest.mark.parametrize(
    ("decoder", "text", "says"),
    [
        ([["mixer.A_log"], ["mixer.up_proj.weight"]], {"hybrid_override_pattern": "ME"},
         "calls layer 1 `MoE`"),
        ([["mixer.A_log"], ["mixer.gate.weight", "mixer.experts.0.w"]], {"hybrid_override_pattern": "EM"},
         "layer 0 `MoE`"),
        ([["mixer.A_log"]], {"layers_block_type": ["mlp"]}, "calls layer 0 `dense`"),
        ([ATTENTION + DENSE, ATTENTION + MOE], {"first_k_dense_replace": 0}, "calls layer 0 `MoE`"),
        ([ATTENTION + MOE, ATTENTION + MOE], {"first_k_dense_replace": 1}, "calls layer 0 `dense`"),
    ],
)  # fmt: skip
def test_a_config_of_another_model_is_refused_b59_b71(
    decoder: list[list[str]], text: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        told(decoder, text)


def test_the_published_model() -> None:
    found = kinds(find_layers(inventory(ULTRA), ULTRA), ULTRA)
    assert [str(kind) for kind in found[:9]] == ["mamba", "MoE"] * 3 + ["mamba", "attention", "MoE"]


A, B = Kind("a", "dense"), Kind("a", "MoE")


def chosen(text: dict[str, Any], found: list[Kind], nbytes: list[int]) -> list[tuple[tuple[int, ...], str]]:
    made = choose("blocks", found, nbytes, lambda keep: check_expressible(text, len(found), keep))
    return [tuple(run) for run in made]  # type: ignore[misc]


def test_the_cheapest_layers_that_the_config_can_say() -> None:
    """Every second layer MoE, while the cheapest layers of the two kinds follow no such rule."""
    jamba = {"num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "num_hidden_layers": 6}
    assert chosen(jamba, [A, B] * 3, [9, 1, 1, 2, 1, 2]) == [
        ((1,), "a + MoE"),
        ((2,), "a + dense"),
    ]
    deepseek = {"first_k_dense_replace": 2, "num_hidden_layers": 5}
    assert chosen(deepseek, [A, A, B, B, B], [3, 2, 9, 8, 8]) == [((1,), "a + dense"), ((3,), "a + MoE")]
    moe = [Kind(mixer, "MoE") for mixer in "xyz"]
    found = [A, moe[0], A, moe[1], A, moe[2], A, moe[0]]
    made = chosen(jamba | {"num_hidden_layers": 8}, found, [1, 5] * 4)
    assert [run for run, _ in made] == [(1,), (2,), (3,), (4,), (5,)]
    assert [why for _, why in made].count(ADDED) == 1
    assert [why for _, why in made].count("y + MoE that the config can say") == 1


def test_layers_that_share_keys_and_values_bring_those_they_take_them_from() -> None:
    """Gemma 3n: any own layer covers its kind, but the sharing ones need the last of each type."""
    types = ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(30)]
    text = {"num_hidden_layers": 30, "num_kv_shared_layers": 10, "layer_types": types}
    found = [Kind(f"{words} {'shared' if i >= 20 else 'own'}", "dense") for i, words in enumerate(types)]
    assert [run for run, _ in chosen(text, found, [3] * 30)] == [(18,), (19,), (20,), (24,)]


def test_where_no_choice_can_be_said_the_reason_is_given() -> None:
    with pytest.raises(ConvtoolsError, match="shared by several layers"):
        chosen({"num_mem_blocks": 2, "num_hidden_layers": 4}, [A, B, A, B], [1] * 4)
